"""Mediated devices, which no runtime of Kata can attach."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal

if TYPE_CHECKING:
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.model.vgpu import Vgpu

ISSUE = "kata-containers/kata-containers#10681"


def refuse_mediated(host: HostSnapshot, name: str) -> None:
    """Make sure that a name is not that of a mediated device.

    Raises:
        Refusal: it is; the hint is what works instead.

    """
    vgpu = host.vgpu(name)
    if vgpu is not None and vgpu.uuid is not None:
        raise Refusal(why_not(vgpu), instead_of(vgpu))


def why_not(vgpu: Vgpu) -> str:
    """What becomes of it: the Go runtime loses or mistakes its address, the other finds no PCI."""
    return (
        f"{vgpu} is a mediated device of {vgpu.parent}, and Kata cannot attach one: the Go runtime "
        f"passes a wrong address or the whole parent, runtime-rs finds no PCI device ({ISSUE})"
    )


def instead_of(vgpu: Vgpu) -> str:
    """What works."""
    return (
        "give a virtual function (vfiomgr sriov set), a vGPU of a virtual function (vfiomgr vgpu "
        f"create on a GPU of the vendor's own interface) or the whole GPU {vgpu.parent} (vfiomgr "
        f"bind); or use the mediated device with libvirt: vfiomgr libvirt hostdev {vgpu.name}"
    )
