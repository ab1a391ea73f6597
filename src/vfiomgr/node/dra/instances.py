"""Which vGPUs can be created in the GPU instances (MIG) of a GPU, as counters.

Memory slices and engines are counters. A vGPU has a placement:
its number is the first memory slice of its GPU instance, times the vGPUs that fit in one instance.
Placements of existing instances are for types of their profile, all others for new instances. As
soon as a claim or an active vGPU has a placement, its slices leave the counters, and only vGPUs of
the same type can be created beside it, in the same instance. The driver may place a new instance
elsewhere. Its real slices are known when it exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import Struct

from vfiomgr.node.dra.counters import FUNCTIONS, Offer, Offers, Share

if TYPE_CHECKING:
    from vfiomgr.vgpu.instance_model import GpuInstance, GpuPartition, InstanceProfile
    from vfiomgr.vgpu.model import Vgpu, VgpuType

_ENGINES = ("multiprocessors", "decoders", "encoders", "jpeg-engines", "optical-flow-engines")
"""In the order of `InstanceProfile.engines`."""


class _Slot(Struct):
    """A placement that a claim or an active vGPU has."""

    kind: VgpuType
    start: int
    """As in the names of its devices; the instance of a created vGPU may be elsewhere."""
    profile: InstanceProfile
    instance: GpuInstance | None = None
    claimed: int = 0
    foreign: int = 0
    """vGPUs in it that no allocated device stands for."""

    @property
    def slices(self) -> range:
        """Its memory slices."""
        if self.instance is not None:
            return _slices(self.instance.start, self.instance.size)
        return _slices(self.start, self.profile.size)


class _Slots:
    def __init__(self, shared: Share, partition: GpuPartition) -> None:
        self._partition = partition
        self.taken: dict[tuple[int, str], _Slot] = {}
        self.is_complete = True
        """Whether the placement of each vGPU is known."""
        for kind, number in shared.claimed.values():
            slot = self._at(kind, number // _per_instance(kind))
            if slot is not None:
                slot.claimed += 1
        own = [vgpu for vgpu in shared.gpu.instances if vgpu.name in shared.own]
        for vgpu in own:
            kind, number = shared.claimed[shared.own[vgpu.name]]
            planned = self._at(kind, number // _per_instance(kind))
            if planned is not None and planned.instance is None:
                planned.instance = self._instance_of(vgpu, kind, planned.start)
        for vgpu in shared.foreign:
            self._add_foreign(vgpu, shared.gpu.type_of(vgpu))

    @property
    def used(self) -> frozenset[int]:
        """The numbers of GPU instances with vGPUs."""
        return frozenset(s.instance.id for s in self.taken.values() if s.instance is not None)

    def _at(self, kind: VgpuType, start: int) -> _Slot | None:
        profile = self._partition.profile(kind.instance_profile)
        if profile is None:
            return None
        return self.taken.setdefault((start, kind.id), _Slot(kind, start, profile))

    def _instance_of(self, vgpu: Vgpu, kind: VgpuType, start: int) -> GpuInstance | None:
        """The instance of a vGPU; if the driver does not report it, a free one of its profile."""
        if vgpu.gpu_instance is not None:
            return next((i for i in self._partition.instances if i.id == vgpu.gpu_instance), None)
        used = self.used
        fitting = [
            instance
            for instance in self._partition.instances
            if instance.profile == kind.instance_profile and instance.id not in used
        ]
        return min(fitting, key=lambda instance: instance.start != start, default=None)

    def _add_foreign(self, vgpu: Vgpu, kind: VgpuType | None) -> None:
        if kind is None or kind.instance_profile is None:
            self.is_complete = False
            return
        if vgpu.gpu_instance is None:
            for known in self.taken.values():
                if known.kind == kind and 0 < known.foreign < _per_instance(kind):
                    known.foreign += 1
                    return
        instance = self._instance_of(vgpu, kind, -1)
        slot = None if instance is None else self._at(kind, instance.start)
        if instance is None or slot is None or slot.instance not in (None, instance):
            self.is_complete = False
            return
        slot.instance = instance
        slot.foreign += 1
        if slot.claimed + slot.foreign > _per_instance(kind):
            self.is_complete = False  # the vGPU of a claim will be elsewhere


def offers_in_instances(shared: Share, partition: GpuPartition) -> Offers:
    """The vGPUs of a GPU in MIG mode, with functions, memory slices and engines as counters."""
    slots = _Slots(shared, partition)
    counters = _instance_counters(shared, partition, slots)
    numbered = {
        shared.name(kind, number): Offer(shared.name(kind, number), kind, {FUNCTIONS: 1})
        for kind, number in shared.claimed.values()
    }
    if slots.is_complete:
        places = (*_beside(shared, slots), *_placements(shared, partition, slots))
        for kind, number, taken in places:
            name = shared.name(kind, number)
            offered = Offer(name, kind, {FUNCTIONS: 1, **{n: taken[n] for n in taken if taken[n]}})
            numbered.setdefault(name, offered)
    return Offers(counters, tuple(numbered.values()))


def _per_instance(kind: VgpuType) -> int:
    return kind.per_instance or 1


def _slices(start: int, size: int) -> range:
    return range(start, start + size)


def _slice(number: int) -> str:
    return f"memory-slice-{number}"


def _instance_counters(shared: Share, partition: GpuPartition, slots: _Slots) -> dict[str, int]:
    blocked = {number for place in _blocked(partition, slots) for number in place}
    ends = [start + profile.size for profile in partition.profiles for start in profile.starts]
    counters = {_slice(n): int(n not in blocked) for n in range(max(ends, default=0))}
    planned = [slot.profile for slot in slots.taken.values() if slot.instance is None]
    known = {profile.id: profile for profile in partition.profiles}
    there = [known[one.profile] for one in partition.instances if one.profile in known]
    whole: dict[str, int] = {}
    for profile in partition.profiles:
        for name, count in _parts(profile).items():
            whole[name] = max(whole.get(name, 0), count)
        if not profile.engines:
            whole[_of_profile(profile)] = profile.total
    for profile in (*planned, *there):
        for name, count in _parts(profile).items():
            whole[name] = max(0, whole[name] - count)
    return {FUNCTIONS: shared.functions, **counters, **whole}


def _of_profile(profile: InstanceProfile) -> str:
    return f"profile-{profile.id}"


def _parts(profile: InstanceProfile) -> dict[str, int]:
    """The engines of an instance; if they are unknown, itself as one of its profile."""
    if not profile.engines:
        return {_of_profile(profile): 1}
    return dict(zip(_ENGINES, profile.engines, strict=False))


def _blocked(partition: GpuPartition, slots: _Slots) -> list[range]:
    """The memory slices of vGPUs, and of instances in which the host runs something."""
    busy = [one for one in partition.instances if one.processes]
    places = [_slices(one.start, one.size) for one in busy]
    return [*(slot.slices for slot in slots.taken.values()), *places]


def _beside(shared: Share, slots: _Slots) -> Iterator[tuple[VgpuType, int, dict[str, int]]]:
    for slot in slots.taken.values():
        each = _per_instance(slot.kind)
        numbers = _slices(slot.start * each, each)
        left = [n for n in numbers if shared.name(slot.kind, n) not in shared.claimed]
        for number in left[: max(0, len(left) - slot.foreign)]:
            yield slot.kind, number, {}


def _placements(
    shared: Share, partition: GpuPartition, slots: _Slots
) -> Iterator[tuple[VgpuType, int, dict[str, int]]]:
    """First vGPUs of existing and of new instances, the last placement first."""
    blocked = _blocked(partition, slots)
    idle = [one for one in partition.instances if one.id not in slots.used and not one.processes]
    there = [*blocked, *(_slices(one.start, one.size) for one in idle)]
    for kind in shared.gpu.types:
        profile = partition.profile(kind.instance_profile)
        if profile is None or kind.instance_profile is None:
            continue
        starts = {one.start for one in idle if one.profile == profile.id}
        for start in sorted(starts, reverse=True):
            yield _placed(kind, start, profile, {})
        for start in sorted(profile.starts, reverse=True):
            end = start + profile.size
            if not any(start < other.stop and other.start < end for other in there):
                yield _placed(kind, start, profile, _parts(profile))


def _placed(
    kind: VgpuType, start: int, profile: InstanceProfile, parts: dict[str, int]
) -> tuple[VgpuType, int, dict[str, int]]:
    slices = {_slice(number): 1 for number in _slices(start, profile.size)}
    return kind, start * _per_instance(kind), {**slices, **parts}
