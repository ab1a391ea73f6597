"""Which vGPUs live in which GPU instances (MIG), and how many more these hold.

A GPU instance holds vGPUs of one framebuffer size, as many as their type says. Where the driver
does not tell which one a vGPU lives in, it fills those of its size, and then an empty one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.vgpu.capacity import Gpu
    from vfiomgr.vgpu.mig.model import GpuInstance
    from vfiomgr.vgpu.model import Vgpu, VgpuType


class _Slot(Struct):
    """A GPU instance that is there, or would be."""

    profile: int
    size: int | None = None
    """MiB of the vGPUs inside."""
    taken: int = 0

    def left(self, kind: VgpuType) -> int:
        """How many more of a type it holds."""
        if kind.instance_profile != self.profile or (self.taken and kind.framebuffer != self.size):
            return 0
        return max(0, (kind.per_instance or 1) - self.taken)

    def take(self, kind: VgpuType) -> None:
        """Hold one more."""
        self.size = kind.framebuffer
        self.taken += 1


def seats(gpu: Gpu, kind: VgpuType) -> int:
    """How many more of a type fit into the GPU instances that are there."""
    return sum(slot.left(kind) for slot in _slots(gpu))


def lacking(gpu: Gpu, kinds: Iterable[VgpuType]) -> dict[int, int]:
    """By profile, how many GPU instances are missing for so many more vGPUs."""
    slots = _slots(gpu)
    missing: dict[int, int] = {}
    for kind in kinds:
        if kind.instance_profile is None or _seat(slots, kind):
            continue
        missing[kind.instance_profile] = missing.get(kind.instance_profile, 0) + 1
        slots.append(_Slot(kind.instance_profile))
        _seat(slots, kind)
    return missing


def occupants(gpu: Gpu, instance: GpuInstance) -> list[Vgpu]:
    """The vGPUs that live in a GPU instance, and those that may."""
    return [vgpu for vgpu in gpu.instances if _may_live_in(gpu, vgpu, instance)]


def _may_live_in(gpu: Gpu, vgpu: Vgpu, instance: GpuInstance) -> bool:
    if vgpu.gpu_instance is not None:
        return vgpu.gpu_instance == instance.id
    kind = gpu.type_of(vgpu)
    return kind is None or kind.instance_profile in (None, instance.profile)


def _slots(gpu: Gpu) -> list[_Slot]:
    """The GPU instances that are there, with the vGPUs in them."""
    there = gpu.partition.instances if gpu.partition is not None else ()
    by_number = {one.id: _Slot(one.profile) for one in there}
    slots = list(by_number.values())
    unknown: list[VgpuType] = []
    for vgpu in gpu.instances:
        kind = gpu.type_of(vgpu)
        slot = by_number.get(-1 if vgpu.gpu_instance is None else vgpu.gpu_instance)
        if kind is not None and slot is not None:
            slot.take(kind)
        elif kind is not None:
            unknown.append(kind)
    for kind in unknown:
        _seat(slots, kind)
    return slots


def _seat(slots: Iterable[_Slot], kind: VgpuType) -> bool:
    """Put one where it fits, beside others of its size first."""
    fitting = [slot for slot in slots if slot.left(kind)]
    if fitting:
        max(fitting, key=lambda slot: slot.taken).take(kind)
    return bool(fitting)
