"""NVIDIA's sriov-manage: where it makes virtual functions, and what it does besides.

It takes the GPU from its driver, gives it back, and ends with persistence mode switched on. A GPU
in that mode has a use count that no open file shows, and its driver never lets it go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.passthrough.steps import ChangeDriver
from vfiomgr.vgpu.mig.steps import RunSriovManage, SetPersistence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.engine.step import Step
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

DRIVER = "nvidia"
"""Whose virtual functions a program of the vendor makes, since it also sets them up."""


def makes_by_program(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether NVIDIA's sriov-manage makes the virtual functions of a device."""
    return device.driver == DRIVER and host.has_sriov_manage


def persistence_before(host: HostSnapshot, device: PciDevice) -> Iterator[SetPersistence]:
    """Persistence mode as it is before the program runs, where that is off.

    Going forward there is nothing to do. Undoing comes by here once the program has run again, and
    switches the mode off before anything takes the GPU from its driver.
    """
    if host.in_persistence_mode(device.address) is False:
        yield SetPersistence(device.identity, before=False, after=False)


def kept_from_leaving(host: HostSnapshot, steps: Iterable[Step]) -> Iterator[ChangeDriver]:
    """The steps that would take a GPU from its driver while that never lets it go."""
    is_on: dict[PciAddress, bool | None] = {}
    for step in steps:
        match step:
            case RunSriovManage():
                is_on[step.device.address] = True
            case SetPersistence():
                is_on[step.device.address] = step.after
            case ChangeDriver() if step.after.driver != DRIVER:
                address = step.device.address
                if is_on.get(address, host.in_persistence_mode(address)):
                    yield step
                is_on[address] = False
