"""Which vGPUs run in which GPU instances (MIG), and how many more fit.

A GPU instance carries vGPUs of one framebuffer size, as many as their type allows. If the driver
does not report the GPU instance of a vGPU, instances of its size are filled first, then empty ones.
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
    """An existing or planned GPU instance."""

    profile: int
    size: int | None = None
    """MiB of the vGPUs inside."""
    taken: int = 0

    def left(self, kind: VgpuType) -> int:
        """How many more vGPUs of a type fit into it."""
        if kind.instance_profile != self.profile or (self.taken and kind.framebuffer != self.size):
            return 0
        return max(0, (kind.per_instance or 1) - self.taken)

    def take(self, kind: VgpuType) -> None:
        """Add one vGPU."""
        self.size = kind.framebuffer
        self.taken += 1


def seats(gpu: Gpu, kind: VgpuType) -> int:
    """How many more vGPUs of a type fit into the existing GPU instances."""
    return sum(slot.left(kind) for slot in _slots(gpu))


def lacking(gpu: Gpu, kinds: Iterable[VgpuType]) -> dict[int, int]:
    """How many GPU instances of each profile are missing for more vGPUs."""
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
    """The vGPUs that run in a GPU instance, and those that may."""
    return [vgpu for vgpu in gpu.instances if _may_live_in(gpu, vgpu, instance)]


def _may_live_in(gpu: Gpu, vgpu: Vgpu, instance: GpuInstance) -> bool:
    if vgpu.gpu_instance is not None:
        return vgpu.gpu_instance == instance.id
    kind = gpu.type_of(vgpu)
    return kind is None or kind.instance_profile in (None, instance.profile)


def _slots(gpu: Gpu) -> list[_Slot]:
    """The existing GPU instances with their vGPUs."""
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
    """Place one vGPU, preferably beside others of its size."""
    fitting = [slot for slot in slots if slot.left(kind)]
    if fitting:
        max(fitting, key=lambda slot: slot.taken).take(kind)
    return bool(fitting)
