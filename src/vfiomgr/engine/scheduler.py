"""Which steps of a plan may begin: lanes side by side, the steps of one lane in their order."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from vfiomgr.engine.plan import FIRST, LAST

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Plan


class Schedule:
    """The steps that are left, by lane."""

    def __init__(self, plan: Plan, first: int = 0) -> None:
        """`first` is the number of the plan's first step, where others went before."""
        self._lane_of = dict(enumerate(plan.lanes or (0,) * len(plan.steps), start=first))
        self._left: dict[int, deque[int]] = {}
        for step, lane in self._lane_of.items():
            self._left.setdefault(lane, deque()).append(step)
        self._busy: set[int] = set()

    @property
    def width(self) -> int:
        """How many steps may ever be under way at once."""
        return max(1, len(self._left.keys() - {FIRST, LAST}))

    def ready(self) -> list[int]:
        """The steps that may begin now."""
        under_way = {lane for lane, steps in self._left.items() if steps} | self._busy
        between = under_way - {FIRST, LAST}
        lanes = [FIRST] if FIRST in under_way else [lane for lane in self._left if lane in between]
        lanes = lanes or [LAST]
        return [
            self._left[lane][0] for lane in lanes if lane not in self._busy and self._left.get(lane)
        ]

    def begin(self, step: int) -> None:
        """A step is under way."""
        lane = self._lane_of[step]
        self._left[lane].popleft()
        self._busy.add(lane)

    def finish(self, step: int) -> None:
        """A step has come to its end; the next one of its lane may begin."""
        self._busy.discard(self._lane_of[step])
