"""Mediated devices, which no runtime of Kata can attach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal
from vfiomgr.planner.guest.units import is_uuid

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.model.vgpu import Vgpu

ISSUE = "kata-containers/kata-containers#10681"


def refuse_mediated(host: HostSnapshot, name: str, otherwise: str = "") -> None:
    """Make sure that a name is not that of a mediated device.

    Raises:
        Refusal: it is; the hint is what works instead, and `otherwise` after it.

    """
    vgpu = host.vgpu(name)
    if vgpu is not None and vgpu.uuid is not None:
        raise Refusal(why_not(vgpu), instead_of(host, vgpu) + otherwise)
    if vgpu is None and is_uuid(name):
        message = f"{name.lower()}: Kata attaches no mediated device ({ISSUE})"
        libvirt = f"vfiomgr libvirt hostdev {name.lower()}"
        hint = f"name a PCI function (vfiomgr list); a VM of libvirt's can have it: {libvirt}"
        raise Refusal(message, hint + otherwise)


def why_not(vgpu: Vgpu) -> str:
    """What becomes of it: the Go runtime loses or mistakes its address, the other finds no PCI."""
    return (
        f"{vgpu} is a mediated device of {vgpu.parent}, and Kata cannot attach one: the Go runtime "
        f"passes a wrong address or the whole parent, runtime-rs finds no PCI device ({ISSUE})"
    )


def instead_of(host: HostSnapshot, vgpu: Vgpu) -> str:
    """What works on this host."""
    return "; or ".join(_ways(host, vgpu))


def _ways(host: HostSnapshot, vgpu: Vgpu) -> Iterator[str]:
    yield f"give it to a VM of libvirt's: vfiomgr libvirt hostdev {vgpu.name}"
    gpu = _gpu_of(host, vgpu)
    if gpu is not None:
        yield f"give Kata the whole GPU {gpu.address}: {_steps(host, gpu)}"
    vendors = [p.name for p in host.vgpu_parents if p.family == "vendor-vfio"]
    free = [name for name in vendors if host.vgpu(name) is None]
    if vendors:
        create = f"vfiomgr vgpu create --parent {(free or vendors)[0]} --type …"
        yield f"give Kata a vGPU that is a virtual function: {create}"


def _gpu_of(host: HostSnapshot, vgpu: Vgpu) -> PciDevice | None:
    """The physical GPU; None where the parent is no PCI function."""
    name = _gpu_name(host, vgpu)
    return next((device for device in host.devices if str(device.address) == name), None)


def _gpu_name(host: HostSnapshot, vgpu: Vgpu) -> str:
    return next((p.gpu for p in host.vgpu_parents if p.name == vgpu.parent), vgpu.parent)


def _steps(host: HostSnapshot, gpu: PciDevice) -> str:
    """What frees a GPU of its vGPUs and gives it to VFIO, in order."""
    name = str(gpu.address)
    vgpus = [vgpu.name for vgpu in host.vgpus if _gpu_name(host, vgpu) == name]
    steps = [f"vfiomgr vgpu remove {' '.join(vgpus)}"]
    if any(device.physical_function == gpu.address for device in host.devices):
        steps.append(f"vfiomgr sriov set {name} 0")
    return ", ".join([*steps, f"vfiomgr bind {name}"])
