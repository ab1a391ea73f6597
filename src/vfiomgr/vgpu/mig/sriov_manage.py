"""NVIDIA's sriov-manage: when it creates virtual functions, and its side effects.

It unbinds the GPU from its driver, binds it again, and turns persistence mode on. A GPU in that
mode has a use count that no open file shows, and its driver never releases it.
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
"""Drivers whose virtual functions a vendor program creates and initializes."""


def makes_by_program(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether NVIDIA's sriov-manage creates the virtual functions of a device."""
    return device.driver == DRIVER and host.has_sriov_manage


def persistence_before(host: HostSnapshot, device: PciDevice) -> Iterator[SetPersistence]:
    """Keep persistence mode off, if it is off before the program runs.

    The step changes nothing when performed. Its undo runs after sriov-manage and turns the mode off
    before anything unbinds the GPU.
    """
    if host.in_persistence_mode(device.address) is False:
        yield SetPersistence(device.identity, before=False, after=False)


def kept_from_leaving(host: HostSnapshot, steps: Iterable[Step]) -> Iterator[ChangeDriver]:
    """The steps that would unbind a GPU while persistence mode holds it."""
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
