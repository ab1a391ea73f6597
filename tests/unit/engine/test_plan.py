"""Plans that are carried out as one."""

from __future__ import annotations

from vfiomgr.engine.plan import Plan, joined
from vfiomgr.persistence.steps import LoadModule

LOAD = tuple(LoadModule(name, name) for name in ("one", "two", "three"))


def test_steps_stay_in_their_order_and_all_else_is_told_once() -> None:
    first = Plan(
        "first",
        LOAD[2:],
        locks=("group-9", "group-10"),
        notes=("it comes along",),
        already=("a is so",),
        resolves=("a",),
        deferred=("c follows",),
        parallel_groups=(1,),
    )
    second = Plan(
        "second",
        LOAD[:2],
        locks=("group-10", "device-1"),
        notes=("it is new", "it comes along"),
        already=("b is so", "a is so"),
        resolves=("b", "a"),
        deferred=("c follows",),
    )
    assert joined("both", [first, second]) == Plan(
        "both",
        (LOAD[2], LOAD[0], LOAD[1]),
        locks=("device-1", "group-10", "group-9"),
        notes=("it comes along", "it is new"),
        already=("a is so", "b is so"),
        resolves=("a", "b"),
        deferred=("c follows",),
    )


def test_nothing_is_an_empty_plan() -> None:
    assert joined("nothing", []) == Plan("nothing", ())
