"""The vGPUs that are there, shared out among a rule's wishes: who stays, who goes, who lacks."""

from __future__ import annotations

import itertools
import uuid as uuids
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vfiomgr.model.intent import CreateVgpu
from vfiomgr.model.layout import VgpuWish
from vfiomgr.model.vgpu import Vgpu
from vfiomgr.planner.layout_parameters import are_others, found_on
from vfiomgr.planner.vgpu_choice import serving
from vfiomgr.planner.vgpu_room import Gpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.model.layout import VgpuRule
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.planner.layout_part import Case

_NAMES = uuids.UUID("5f0c2d8e-6a51-4c0b-9a57-2f6f3f1f8f4e")
"""The name space of the names that layouts give."""


@dataclass(frozen=True)
class Lacking:
    """A wish that is not met, the GPUs that may serve it, and how many of it are there."""

    wish: VgpuWish
    scope: tuple[Gpu, ...]
    there: int


@dataclass
class Shares:
    """What is there, and what is to be."""

    kept: list[tuple[VgpuWish, Vgpu]] = field(default_factory=list)
    missing: list[tuple[Lacking, tuple[str, ...]]] = field(default_factory=list)
    """What is not met, with the names of the vGPUs that are to be made for it."""
    surplus: list[Vgpu] = field(default_factory=list)


def shared_out(case: Case, rule: VgpuRule, known: Sequence[Gpu]) -> Shares:
    """Who stays: those that are named first, then those that guests have, then vfiomgr's own."""
    shares = Shares()
    left = {gpu.name: _by_worth(case.host, gpu) for gpu in known}
    named = {uuid for wish in rule.vgpus for uuid in wish.uuids}
    for wish in sorted(rule.vgpus, key=_by_choice):
        for scope in [tuple(known)] if wish.count else [(gpu,) for gpu in known]:
            count = wish.count or wish.per_gpu or 0
            mine = frozenset(wish.uuids) or None
            kinds = {gpu.name: serving(gpu, creation(wish)) for gpu in scope}
            kept = [
                (gpu, one)
                for gpu in scope
                for one in left[gpu.name]
                if gpu.type_of(one) in kinds[gpu.name]
                and (one.name not in named if mine is None else one.name in mine)
            ]
            kept = sorted(kept, key=lambda pair: _has_other_parameters(case.host, pair[1], wish))
            kept = kept[:count]
            for gpu, one in kept:
                left[gpu.name].remove(one)
                shares.kept.append((wish, one))
            if len(kept) < count:
                lacking = Lacking(wish, scope, len(kept))
                shares.missing.append((lacking, _names(case, lacking, count - len(kept), shares)))
    shares.surplus = [one for gpu in known for one in left[gpu.name]]
    return shares


def creation(wish: VgpuWish, names: tuple[str, ...] = ()) -> CreateVgpu:
    """A wish as an intent of its own."""
    return CreateVgpu(
        names,
        type=wish.type,
        framebuffer=wish.framebuffer,
        series=wish.series,
        heads=wish.heads,
    )


def _by_choice(wish: VgpuWish) -> tuple[bool, bool, bool, bool, int]:
    """Those that few vGPUs can meet come first."""
    return (
        not wish.uuids,
        wish.parameters is None,
        wish.per_gpu is None,
        wish.type is None,
        -(wish.framebuffer or 0),
    )


def _has_other_parameters(host: HostSnapshot, one: Vgpu, wish: VgpuWish) -> bool:
    return are_others(found_on(host, one) or "", wish)


def _by_worth(host: HostSnapshot, gpu: Gpu) -> list[Vgpu]:
    def worth(one: Vgpu) -> tuple[bool, bool, str]:
        return not host.holders(one), not host.is_own(one), one.name

    return sorted(gpu.instances, key=worth)


def _names(case: Case, lacking: Lacking, count: int, shares: Shares) -> tuple[str, ...]:
    """Names for new ones: the wish's own, or the first that are free of an endless row of them."""
    wish = lacking.wish
    taken = {one.name for one in case.host.vgpus}
    taken.update(name for _, names in shares.missing for name in names)
    place = lacking.scope[0].name if wish.per_gpu else ""
    row = f"{case.intent.seed} {case.intent.name} {place} {wish}"
    endless = (str(uuids.uuid5(_NAMES, f"{row} {number}")) for number in itertools.count())
    names = iter(wish.uuids) if wish.uuids else endless
    return tuple(itertools.islice((name for name in names if name not in taken), count))
