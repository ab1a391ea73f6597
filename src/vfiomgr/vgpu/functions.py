"""Virtual functions that carry vGPUs: whether a GPU lacks them, and what creates them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vfiomgr.passthrough.steps import ChangeDriver
from vfiomgr.pci.model import PciAddress, PciDevice, is_address
from vfiomgr.vgpu.steps import DRIVER, RunSriovManage, SetPersistence

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Step
    from vfiomgr.snapshot.model import HostSnapshot


def makes_by_program(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether NVIDIA's sriov-manage creates the virtual functions of a device."""
    return device.driver == DRIVER and host.vgpus.has_sriov_manage


def persistence_before(host: HostSnapshot, device: PciDevice) -> Iterator[SetPersistence]:
    """Keep persistence mode off, if it is off before the program runs.

    The step changes nothing when performed. Its undo runs after sriov-manage and turns the mode off
    before anything unbinds the GPU.
    """
    if host.users.in_persistence_mode(device.address) is False:
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
                if is_on.get(address, host.users.in_persistence_mode(address)):
                    yield step
                is_on[address] = False


def creation(host: HostSnapshot, device: PciDevice, count: int | None = None) -> str:
    """The command that creates virtual functions of a device, all of them by default.

    NVIDIA's need their driver, which `sriov set` keeps from binding them.
    """
    if lacks_vgpu_functions(host, device):
        return f"vfiomgr vgpu mode {device.address} vgpu"
    number = count or device.sriov_totalvfs or "COUNT"
    return f"vfiomgr sriov set {device.physical_function or device.address} {number}"


def creation_of(host: HostSnapshot, name: str) -> tuple[PciDevice, str] | None:
    """The physical function of a missing virtual function, and the command that creates it."""
    if not is_address(name) or host.device_named(name) is not None:
        return None
    address = PciAddress.parse(name)
    for device in host.devices:
        index = device.index_of_function(address)
        if index is not None:
            return device, creation(host, device, max(index + 1, device.sriov_numvfs or 0))
    return None


def is_before_ampere(device: PciDevice) -> bool:
    """Whether it is an NVIDIA GPU whose vGPUs are mediated devices of the GPU itself.

    A T4 shows sriov_totalvfs, but no virtual function ever appears (NVIDIA/gpu-operator#2365). By
    pci.ids, IDs up to 1fff and those of TU116 (21xx, from 2180 on) are of Turing or older.
    """
    number = int(device.device_id, 16)
    return device.vendor_id == _NVIDIA and (number < _FIRST_OF_AMPERE or number in _TU116)


_NVIDIA = "10de"


_FIRST_OF_AMPERE = 0x2000


_TU116 = range(0x2180, 0x2200)


def lacks_vgpu_functions(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether an NVIDIA GPU on its driver has no virtual function that can have a vGPU.

    They need a driver for that; `sriov set` creates them without one where the kernel creates them.
    """
    if device.driver != DRIVER or not device.sriov_totalvfs or is_before_ampere(device):
        return False
    if str(device.address) in host.vgpus.parent_names:
        return False
    names = set(map(str, device.virtual_functions))
    functions = filter(None, map(host.device_named, names))
    is_free = host.vgpus.parent_names.isdisjoint(names)
    return is_free and all(function.driver != DRIVER for function in functions)


def without_functions(host: HostSnapshot) -> tuple[PciDevice, ...]:
    """NVIDIA GPUs on their driver that support virtual functions, and have none for vGPUs."""
    return tuple(device for device in host.devices if lacks_vgpu_functions(host, device))
