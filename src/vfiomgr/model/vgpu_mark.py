"""The mark of a vGPU that vfiomgr made: a file that a reboot removes, as it does the vGPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.model.path import RUNTIME

if TYPE_CHECKING:
    from vfiomgr.model.path import HostPath
    from vfiomgr.model.vgpu import Vgpu

MARKS = RUNTIME / "vgpus"


def mark_file(vgpu: Vgpu) -> HostPath:
    """Where the mark of a vGPU is."""
    return MARKS / vgpu.name


def mark_of(vgpu: Vgpu) -> str:
    """What it says: of another parent or type by now, the vGPU is somebody else's."""
    return f"{vgpu.parent} {vgpu.type}\n"
