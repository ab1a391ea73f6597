"""Virtual functions that do not exist, e.g. after a reboot, and the command that creates them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.pci.model import PciAddress
from vfiomgr.vgpu.mig.sriov_manage import DRIVER

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


def creation(device: PciDevice, count: int | None = None) -> str:
    """The command that creates virtual functions of a device, all of them by default.

    NVIDIA's need their driver, which `sriov set` keeps from binding them.
    """
    if device.driver == DRIVER and not device.sriov_numvfs:
        return f"vfiomgr vgpu mode {device.address} vgpu"
    return f"vfiomgr sriov set {device.address} {count or device.sriov_totalvfs}"


def creation_of(host: HostSnapshot, name: str) -> tuple[PciDevice, str] | None:
    """The physical function of a missing virtual function, and the command that creates it."""
    device = host.physical_function_of(name)
    if device is None:
        return None
    index = device.index_of_function(PciAddress.parse(name))
    present = device.sriov_numvfs or 0
    return device, creation(device, None if index is None else max(index + 1, present))


def without_functions(host: HostSnapshot) -> tuple[PciDevice, ...]:
    """NVIDIA GPUs on their driver that support virtual functions and have none."""
    return tuple(
        device
        for device in host.devices
        if device.driver == DRIVER and device.sriov_totalvfs and not device.sriov_numvfs
    )
