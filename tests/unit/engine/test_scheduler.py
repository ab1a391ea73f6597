"""Parallel groups side by side, each in its order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.engine.plan import LAST, Plan, Schedule
from vfiomgr.persistence.steps import LoadModule

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Step


def schedule(*groups: int) -> Schedule:
    steps: tuple[Step, ...] = tuple(LoadModule(str(n), str(n)) for n in range(len(groups) or 3))
    return Schedule(Plan("groups", steps, parallel_groups=groups))


def test_without_groups_all_steps_go_one_after_another() -> None:
    left = schedule()
    order = []
    while ready := left.ready():
        assert len(ready) == 1
        left.begin(ready[0])
        assert left.ready() == []
        left.finish(ready[0])
        order += ready
    assert order == [0, 1, 2]
    assert left.width == 1


def test_group_0_comes_before_the_others_which_go_side_by_side() -> None:
    left = schedule(1, 0, 2, 1)
    assert left.width == 2
    assert left.ready() == [1]
    left.begin(1)
    assert left.ready() == []
    left.finish(1)
    assert left.ready() == [0, 2]
    left.begin(0)
    assert left.ready() == [2]
    left.begin(2)
    left.finish(0)
    assert left.ready() == [3]


def test_the_last_group_waits_for_all_others() -> None:
    left = schedule(1, LAST, 2, LAST)
    assert left.width == 2
    assert left.ready() == [0, 2]
    left.begin(0)
    left.begin(2)
    left.finish(0)
    assert left.ready() == []
    left.finish(2)
    assert left.ready() == [1]
    left.begin(1)
    assert left.ready() == []
    left.finish(1)
    assert left.ready() == [3]
