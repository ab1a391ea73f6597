"""Which steps of a plan may begin: groups in parallel, the steps of a group in order."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from vfiomgr.engine.plan import FIRST, LAST

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Plan


class Schedule:
    """The remaining steps, by group."""

    def __init__(self, plan: Plan, first: int = 0) -> None:
        """`first` is the number of the plan's first step, if other plans came before."""
        self._group_of = dict(
            enumerate(plan.parallel_groups or (0,) * len(plan.steps), start=first)
        )
        self._left: dict[int, deque[int]] = {}
        for step, group in self._group_of.items():
            self._left.setdefault(group, deque()).append(step)
        self._busy: set[int] = set()

    @property
    def width(self) -> int:
        """The maximum number of steps that run in parallel."""
        return max(1, len(self._left.keys() - {FIRST, LAST}))

    def ready(self) -> list[int]:
        """The steps that may begin now."""
        under_way = {group for group, steps in self._left.items() if steps} | self._busy
        between = under_way - {FIRST, LAST}
        groups = (
            [FIRST] if FIRST in under_way else [group for group in self._left if group in between]
        )
        groups = groups or [LAST]
        return [
            self._left[group][0]
            for group in groups
            if group not in self._busy and self._left.get(group)
        ]

    def begin(self, step: int) -> None:
        """Mark a step as running."""
        group = self._group_of[step]
        self._left[group].popleft()
        self._busy.add(group)

    def finish(self, step: int) -> None:
        """Mark a step as finished; the next one of its group may begin."""
        self._busy.discard(self._group_of[step])
