"""Which vGPUs NVIDIA's driver makes beside those that are there.

src/nvidia/src/kernel/virtualization/kernel_vgpu_mgr.c of the open kernel modules: all vGPUs of a
GPU have one framebuffer size, unless it is in heterogeneous mode; then each type has the places
that two of it take at the ends of the smallest part (whole, half, quarter, …) that holds two. With
MIG the GPU instances decide, each of which holds vGPUs of one size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.fakes.nvidia.cards import Card, VgpuKind

Reason = Literal["unknown", "mismatch", "full", "no instance"]
_GIB = 1024
_SMALLEST_PART = 16


@dataclass(frozen=True)
class GpuInstance:
    """A GPU instance of MIG; one with compute instances cannot be destroyed before them."""

    id: int
    profile: int
    start: int
    has_compute: bool = True


@dataclass
class Modes:
    """What a GPU is set to; its instances are runtime state, MIG itself outlasts a reboot."""

    is_heterogeneous: bool = False
    is_mig: bool = False
    instances: list[GpuInstance] = field(default_factory=list)


@dataclass(frozen=True)
class Seat:
    """Where a vGPU lives: its GPU instance, and its place in that or in the GPU, both perhaps."""

    kind: VgpuKind
    instance: int | None = None
    placement: int | None = None


class Rules:
    """The rules of one GPU at one moment."""

    def __init__(self, card: Card, modes: Modes, taken: Sequence[Seat]) -> None:
        self._card = card
        self._modes = modes
        self._taken = taken

    def creatable(self) -> list[VgpuKind]:
        """The types of which there can be another."""
        return [kind for kind in self._card.kinds if isinstance(self.seat(kind), Seat)]

    def more(self, kind: VgpuKind) -> int:
        """How many more, as a parent without virtual functions says it."""
        return kind.max_instance - len(self._taken) if isinstance(self.seat(kind), Seat) else 0

    def seat(self, kind: VgpuKind | None) -> Seat | Reason:
        """Where another one would live, or why there can be none."""
        if kind is None:
            return "unknown"
        if (kind.profile is None) == self._modes.is_mig:
            return "no instance" if kind.profile is not None else "mismatch"
        if self._modes.is_mig:
            return self._seat_in_instance(kind)
        if self._modes.is_heterogeneous:
            return next((s for s in self.seats(kind) if not self._overlaps(s)), "full")
        if any(seat.kind.framebuffer != kind.framebuffer for seat in self._taken):
            return "mismatch"
        return Seat(kind) if len(self._taken) < kind.max_instance else "full"

    def _seat_in_instance(self, kind: VgpuKind) -> Seat | Reason:
        for instance in self._modes.instances:
            if instance.profile != kind.profile:
                continue
            inside = [seat for seat in self._taken if seat.instance == instance.id]
            same_size = all(seat.kind.framebuffer == kind.framebuffer for seat in inside)
            if same_size and len(inside) < kind.per_instance:
                used = {seat.placement for seat in inside}
                size = kind.framebuffer // _GIB
                places = (n * size for n in range(kind.per_instance))
                return Seat(kind, instance.id, next(p for p in places if p not in used))
        return "no instance"

    def seats(self, kind: VgpuKind) -> Iterator[Seat]:
        """Every place that a type has on a heterogeneous GPU."""
        size, whole = kind.framebuffer // _GIB, self._card.framebuffer // _GIB
        part = whole
        while part % 2 == 0 and part // 2 >= 2 * size and part > whole // _SMALLEST_PART:
            part //= 2
        starts = {begin + end for begin in range(0, whole, part) for end in (0, part - size)}
        yield from (Seat(kind, placement=start) for start in sorted(starts))

    def _overlaps(self, wanted: Seat) -> bool:
        begin, end = _extent(wanted)
        return any(begin < e and b < end for b, e in map(_extent, self._taken))

    def can_sit(self, seat: Seat) -> bool:
        """Whether a vGPU may be put there, beside those that are taken."""
        return seat in self.seats(seat.kind) and not self._overlaps(seat)


def _extent(seat: Seat) -> tuple[int, int]:
    start = seat.placement or 0
    return start, start + seat.kind.framebuffer // _GIB
