"""Which steps of a layout's plan run side by side: those of parts that have nothing in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.model.gpu_step import (
    RunSriovManage,
    SetGpuInstances,
    SetHeterogeneous,
    SetMig,
    SetPersistence,
)
from vfiomgr.model.plan import FIRST
from vfiomgr.model.step import LoadModule
from vfiomgr.planner.components import components

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.model.step import Step
    from vfiomgr.planner.layout_part import Part

_PROGRAMS = "NVIDIA's programs"
"""They are run one after the other: they share state of the driver."""


def in_lanes(parts: Iterable[Part]) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    """All steps with a lane for each; a module is loaded once, before all else."""
    moving = [part for part in parts if part.plan.steps]
    all_steps = [step for part in moving for step in part.plan.steps]
    steps: list[Step] = list(dict.fromkeys(s for s in all_steps if isinstance(s, LoadModule)))
    lanes = [FIRST] * len(steps)
    for lane, together in enumerate(components(moving, _bonds), start=1):
        rest = [s for part in together for s in part.plan.steps if not isinstance(s, LoadModule)]
        steps += rest
        lanes += [lane] * len(rest)
    return tuple(steps), tuple(lanes)


def _bonds(part: Part) -> frozenset[str]:
    """Its locks, and one that all have who run programs of NVIDIA's."""
    programs = RunSriovManage | SetGpuInstances | SetHeterogeneous | SetMig | SetPersistence
    has_programs = any(isinstance(step, programs) for step in part.plan.steps)
    return frozenset({*part.plan.locks, *({_PROGRAMS} if has_programs else ())})
