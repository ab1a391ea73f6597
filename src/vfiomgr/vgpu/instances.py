"""GPU instances (MIG): the vGPUs in them, and how further instances fit on a GPU.

With MIG, vGPUs run in GPU instances. An instance carries vGPUs of one framebuffer size, as many as
their type allows. If the driver does not report the GPU instance of a vGPU, instances of its size
are filled first, then empty ones. Instances do not share memory slices, and together use at most
the multiprocessors, decoders, encoders, JPEG and optical-flow engines of the largest profile. The
driver makes the final decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct

from vfiomgr.value import Value
from vfiomgr.vgpu.instance_model import GpuPartition, InstancePlace, InstanceProfile

if TYPE_CHECKING:
    from vfiomgr.vgpu.capacity import Gpu
    from vfiomgr.vgpu.instance_model import GpuInstance
    from vfiomgr.vgpu.model import VgpuType


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


class _Piece(Value):
    """An instance of a profile at a placement."""

    profile: InstanceProfile
    start: int

    @property
    def slices(self) -> range:
        """Its memory slices."""
        return range(self.start, self.start + self.profile.size)

    def overlaps(self, other: range) -> bool:
        """Whether both use the same memory slice."""
        return self.slices.start < other.stop and other.start < self.slices.stop


def lay_out(
    partition: GpuPartition, wanted: Mapping[int, int], fixed: Sequence[GpuInstance] = ()
) -> tuple[InstancePlace, ...] | None:
    """Find placements for more instances of each profile; None if they do not fit.

    Existing instances keep their placements if possible. A new instance goes where it blocks the
    fewest other placements: small ones at the end, as the driver does.
    """
    profiles = {known.id: known for known in partition.profiles}
    pieces = [profiles[number] for number, count in wanted.items() for _ in range(count)]
    pieces.sort(key=lambda profile: (-profile.size, len(profile.starts), profile.id))
    for number, count in wanted.items():
        there = sum(one.profile == number for one in fixed)
        if count and count + there > profiles[number].total:
            return None
    if not _has_engines(partition, pieces, fixed):
        return None
    taken = [range(one.start, one.start + one.size) for one in fixed]
    idle = [one for one in partition.instances if one not in fixed and wanted.get(one.profile)]
    candidates = {profile.id: _candidates(partition, profile, idle) for profile in pieces}
    found = _search(pieces, candidates, taken)
    if found is None:
        return None
    present = {(one.profile, one.start): one.place for one in partition.instances}
    return tuple(
        present.get((piece.profile.id, piece.start))
        or InstancePlace(piece.profile.id, piece.profile.name, piece.start)
        for piece in sorted(found, key=lambda piece: piece.start)
    )


def more_of(partition: GpuPartition, profile: InstanceProfile) -> int:
    """How many more instances of a profile fit beside the existing ones."""
    for count in range(profile.free, 0, -1):
        if lay_out(partition, {profile.id: count}, partition.instances) is not None:
            return count
    return 0


def _has_engines(
    partition: GpuPartition, pieces: Sequence[InstanceProfile], fixed: Sequence[GpuInstance]
) -> bool:
    known = {profile.id: profile.engines for profile in partition.profiles}
    used = [known.get(one.profile, ()) for one in fixed] + [piece.engines for piece in pieces]
    whole = map(max, _columns(known.values()))
    return all(sum(one) <= most for one, most in zip(_columns(used), whole, strict=False))


def _columns(rows: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """The sum of each engine, over profiles with known engines."""
    return zip(*(row for row in rows if row), strict=False)


def _candidates(
    partition: GpuPartition, profile: InstanceProfile, idle: Sequence[GpuInstance]
) -> list[_Piece]:
    """The placements of a profile, those first that block the fewest `idle` instances."""
    there = {(one.profile, one.start) for one in idle}
    every = [_Piece(other, start) for other in partition.profiles for start in other.starts]

    def disturbance(piece: _Piece) -> tuple[bool, int, int, int]:
        hit = sum(piece.overlaps(range(one.start, one.start + one.size)) for one in idle)
        blocked = sum(piece.overlaps(other.slices) for other in every)
        return (profile.id, piece.start) not in there, hit, blocked, -piece.start

    return sorted((_Piece(profile, start) for start in profile.starts), key=disturbance)


def _search(
    pieces: Sequence[InstanceProfile],
    candidates: Mapping[int, Sequence[_Piece]],
    taken: list[range],
    begin: int = 0,
) -> list[_Piece] | None:
    """The first way to place all instances, in the order of the candidates of each profile."""
    if not pieces:
        return []
    first, *rest = pieces
    for number, piece in enumerate(candidates[first.id][begin:], start=begin):
        if any(piece.overlaps(other) for other in taken):
            continue
        again = number + 1 if rest and rest[0].id == first.id else 0
        found = _search(rest, candidates, [*taken, piece.slices], again)
        if found is not None:
            return [piece, *found]
    return None
