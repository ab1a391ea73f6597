"""Mediated devices, which Kata does not support, and what works instead."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import refuse, refuse_if_any
from vfiomgr.errors import UnknownDevice
from vfiomgr.passthrough.guards import bridge
from vfiomgr.snapshot.named import find_device
from vfiomgr.units import is_uuid

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu


ISSUE = "kata-containers/kata-containers#10681"


def refuse_mediated(host: HostSnapshot, name: str, otherwise: str = "") -> None:
    """Make sure that a name is not that of a mediated device."""
    vgpu = host.vgpus.named(name)
    if vgpu is not None and vgpu.uuid is not None:
        hint = instead_of(host, vgpu) + otherwise
        refuse("kata-mediated", vgpu.name, why_not(vgpu), hint)
    if vgpu is None and is_uuid(name):
        message = f"active vGPU not found: {name.lower()}"
        hint = "name a PCI function (vfiomgr list); Kata does not support mediated vGPUs"
        raise UnknownDevice(message, hint + otherwise)


def devices_named(host: HostSnapshot, names: Iterable[str]) -> tuple[PciDevice, ...]:
    """The functions with these addresses.

    Raises:
        Refusal: one is a bridge or a mediated device.
        UsageError: there is no such device.
    """
    names = tuple(names)
    for name in names:
        refuse_mediated(host, name)
    found = tuple(find_device(host, name) for name in names)
    refuse_if_any([o for device in found for o in bridge(host, device)], frozenset())
    return found


def why_not(vgpu: Vgpu) -> str:
    """The effect: the Go runtime loses or mistakes its address, runtime-rs finds no PCI device."""
    return (
        f"{vgpu} is a mediated device of {vgpu.parent}, which Kata does not support: the Go "
        "runtime passes a wrong address or the entire parent, runtime-rs finds no PCI device "
        f"({ISSUE})"
    )


def instead_of(host: HostSnapshot, vgpu: Vgpu) -> str:
    """What works on this host."""
    return "; or ".join(_ways(host, vgpu))


def _ways(host: HostSnapshot, vgpu: Vgpu) -> Iterator[str]:
    yield f"assign it to a libvirt VM: vfiomgr libvirt hostdev {vgpu.name}"
    gpu = _gpu_of(host, vgpu)
    if gpu is not None:
        yield f"assign the entire GPU {gpu.address} to Kata: {_steps(host, gpu)}"
    vendors = [p.name for p in host.vgpus.parents if p.family == "vendor-vfio"]
    free = [name for name in vendors if host.vgpus.named(name) is None]
    if vendors:
        create = f"vfiomgr vgpu create --parent {(free or vendors)[0]} --type …"
        yield f"assign a vGPU that is a virtual function to Kata: {create}"


def _gpu_of(host: HostSnapshot, vgpu: Vgpu) -> PciDevice | None:
    """The physical GPU; None if the parent is not a PCI function."""
    name = _gpu_name(host, vgpu)
    return next((device for device in host.devices if str(device.address) == name), None)


def _gpu_name(host: HostSnapshot, vgpu: Vgpu) -> str:
    return next((p.gpu for p in host.vgpus.parents if p.name == vgpu.parent), vgpu.parent)


def _steps(host: HostSnapshot, gpu: PciDevice) -> str:
    """The commands that remove the vGPUs of a GPU and bind it, in order."""
    name = str(gpu.address)
    vgpus = [vgpu.name for vgpu in host.vgpus.active if _gpu_name(host, vgpu) == name]
    steps = [f"vfiomgr vgpu remove {' '.join(vgpus)}"]
    if any(device.physical_function == gpu.address for device in host.devices):
        steps.append(f"vfiomgr sriov set {name} 0")
    return ", ".join([*steps, f"vfiomgr bind {name}"])
