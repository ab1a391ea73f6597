"""Runs on the same devices that were cut off one after the other, undone as one.

The later run found what the earlier one had left half done, and recorded that as the state before
itself. Nobody wants it back: the earlier run knows what was there before both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vfiomgr.model.step import Step
from vfiomgr.planner.topics import covered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.executor.journal import CutOff, Journal
    from vfiomgr.executor.unfinished import Unfinished


def overlapping(runs: Sequence[CutOff]) -> list[tuple[CutOff, ...]]:
    """Runs of one boot that touched the same, each group oldest first; the newest group first.

    A reboot ends what a run did to devices, so a run of another boot is undone by itself.
    """
    groups: list[tuple[CutOff, ...]] = []
    for run in runs:
        joined = [group for group in groups if any(_overlap(run, other) for other in group)]
        groups = [group for group in groups if group not in joined]
        groups.append((*(other for group in joined for other in group), run))
    order = {run: number for number, run in enumerate(runs)}
    return [tuple(sorted(group, key=order.__getitem__)) for group in reversed(groups)]


def _overlap(one: CutOff, other: CutOff) -> bool:
    if one.boot_id != other.boot_id:
        return False
    return bool(one.locks & other.locks or one.subjects & other.subjects)


@dataclass(frozen=True, slots=True)
class Sequel:
    """The steps of several runs in their order, numbered from 0 through all of them."""

    steps: tuple[Step, ...]
    firsts: tuple[int, ...]
    """The number of the first step of each run."""
    begun: tuple[int, ...]
    """The steps to undo: those that no earlier run leads back from."""
    covered: Mapping[int, int]
    """Each other step that was begun, with the one that leads back from it."""


def sequel(runs: Sequence[Unfinished]) -> Sequel:
    """Runs as one, the oldest first."""
    steps: list[Step] = []
    firsts: list[int] = []
    begun: list[list[tuple[int, Step]]] = []
    for run in runs:
        firsts.append(len(steps))
        begun.append([(len(steps) + number, run.steps[number]) for number in run.begun])
        steps += run.steps
    left_out = covered(begun)
    numbers = (number for run in begun for number, _ in run)
    return Sequel(
        tuple(steps), tuple(firsts), tuple(n for n in numbers if n not in left_out), left_out
    )


class Journals:
    """The journals of such runs, written as one: each gets what is about its own steps."""

    def __init__(self, journals: Sequence[Journal], runs: Sequel) -> None:
        self._journals = journals
        self._runs = runs

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open files."""
        return tuple(one for journal in self._journals for one in journal.descriptors)

    def record(
        self, event: str, details: Mapping[str, object] | None = None, *, durable: bool = True
    ) -> None:
        """Append a record; an end is that of all runs, the newest first.

        A step that an earlier run leads back from is undone with that one, and recorded before it:
        whoever is interrupted here never finds a later run alone.
        """
        number = (details or {}).get("step")
        if not isinstance(number, int):
            for journal in reversed(self._journals):
                journal.record(event, details, durable=durable)
            return
        alike = [step for step, by in self._runs.covered.items() if by == number]
        for step in (*(alike if event == "undo-done" else ()), number):
            run = max(n for n, first in enumerate(self._runs.firsts) if first <= step)
            own = step - self._runs.firsts[run]
            self._journals[run].record(event, {**(details or {}), "step": own}, durable=durable)
