"""A plan: the steps from the host as it is to what an intent wants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vfiomgr.engine.step import Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FIRST = 0
"""The lane whose steps come before those of all others."""
LAST = -1
"""The lane whose steps come after those of all others."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What `--dry-run` prints is what a run executes."""

    summary: str
    steps: tuple[Step, ...]
    locks: tuple[str, ...] = ()
    """Names of what no other process may change meanwhile, e.g. `group-38`."""
    notes: tuple[str, ...] = ()
    """What a reader should know: companions that come along, functions that are left alone."""
    already: tuple[str, ...] = ()
    """What is in the wanted state and not touched."""
    resolves: tuple[str, ...] = ()
    """The functions and vGPUs that are as somebody wants them afterwards, moved or not."""
    later: tuple[str, ...] = ()
    """What can be planned only once this is done: about functions that do not exist yet."""
    lanes: tuple[int, ...] = ()
    """For each step its lane; they run side by side, after FIRST, before LAST. Empty: in order."""

    @property
    def is_empty(self) -> bool:
        """Whether the host is as wanted already."""
        return not self.steps


def joined(summary: str, plans: Sequence[Plan]) -> Plan:
    """One plan of several, whose steps are taken in their order, without lanes."""
    return Plan(
        summary,
        tuple(step for plan in plans for step in plan.steps),
        locks=tuple(sorted({lock for plan in plans for lock in plan.locks})),
        notes=_distinct(note for plan in plans for note in plan.notes),
        already=_distinct(text for plan in plans for text in plan.already),
        resolves=_distinct(name for plan in plans for name in plan.resolves),
        later=_distinct(text for plan in plans for text in plan.later),
    )


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
