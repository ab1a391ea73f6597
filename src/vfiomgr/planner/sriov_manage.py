"""NVIDIA's sriov-manage: where it makes virtual functions, and what it does besides.

It takes the GPU from its driver, gives it back, and ends with persistence mode switched on. A GPU
in that mode has a use count that no open file shows, and its driver never lets it go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.model.gpu_step import SetPersistence

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.snapshot import HostSnapshot

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
