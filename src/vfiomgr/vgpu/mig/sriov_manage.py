"""NVIDIA's sriov-manage: its side effects, and virtual functions that only it creates.

It unbinds the GPU from its driver, binds it again, and turns persistence mode on. A GPU in that
mode has a use count that no open file shows, and its driver never releases it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.passthrough.steps import ChangeDriver
from vfiomgr.pci.model import PciAddress
from vfiomgr.vgpu.mig.steps import RunSriovManage, SetPersistence

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.engine.plan import Step
    from vfiomgr.pci.model import PciDevice
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


def creation(host: HostSnapshot, device: PciDevice, count: int | None = None) -> str:
    """The command that creates virtual functions of a device, all of them by default.

    NVIDIA's need their driver, which `sriov set` keeps from binding them.
    """
    if lacks_vgpu_functions(host, device):
        return f"vfiomgr vgpu mode {device.address} vgpu"
    return f"vfiomgr sriov set {device.address} {count or device.sriov_totalvfs}"


def creation_of(host: HostSnapshot, name: str) -> tuple[PciDevice, str] | None:
    """The physical function of a missing virtual function, and the command that creates it."""
    device = host.physical_function_of(name)
    if device is None:
        return None
    index = device.index_of_function(PciAddress.parse(name))
    present = device.sriov_numvfs or 0
    return device, creation(host, device, None if index is None else max(index + 1, present))


def lacks_vgpu_functions(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether an NVIDIA GPU on its driver has no virtual function that can have a vGPU.

    They have their GPU's driver for that; `sriov set` creates them without one where the kernel
    creates them.
    """
    functions = (host.device_named(str(address)) for address in device.virtual_functions)
    drivers = {function.driver for function in functions if function is not None}
    return device.driver == DRIVER and bool(device.sriov_totalvfs) and DRIVER not in drivers


def without_functions(host: HostSnapshot) -> tuple[PciDevice, ...]:
    """NVIDIA GPUs on their driver that support virtual functions, and have none for vGPUs."""
    return tuple(device for device in host.devices if lacks_vgpu_functions(host, device))
