"""Which changes of health the kubelet is told, and when."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from tests.unit.node.stories import NAME, resource, with_unhealthy
from vfiomgr.diagnostic import blocker
from vfiomgr.node.model import Inventory, NodeResource
from vfiomgr.node.offers import Offers

if TYPE_CHECKING:
    from vfiomgr.node.offers import Key

TWO = resource(2)
FIRST, SECOND = (unit.id for unit in TWO.units)
SICK = with_unhealthy(TWO, FIRST)


def health(
    offers: Offers,
    found: NodeResource,
    now: float,
    pods: dict[Key, str] | None = None,
    quarantine: tuple[str, ...] = (),
) -> list[bool]:
    offered = offers.merge(Inventory((found,)), pods or {}, quarantine, now)
    return [unit.is_healthy for unit in offered.units]


def test_a_device_is_reported_after_it_was_unhealthy_for_a_while() -> None:
    offers = Offers(10)
    assert health(offers, TWO, 0) == [True, True]
    assert offers.wait(0) is None
    assert health(offers, SICK, 5) == [True, True]
    assert offers.wait(7) == 8
    assert health(offers, SICK, 14.9) == [True, True]
    assert health(offers, SICK, 15) == [False, True]
    assert offers.wait(15) is None
    assert health(offers, TWO, 16) == [True, True]


def test_a_reset_of_a_second_is_never_seen() -> None:
    offers = Offers(10)
    health(offers, TWO, 0)
    health(offers, SICK, 5)
    health(offers, TWO, 6)
    assert offers.wait(6) is None
    assert health(offers, SICK, 15) == [True, True]
    assert offers.wait(15) == 10


def test_a_device_that_was_never_healthy_is_not_offered_as_such() -> None:
    assert health(Offers(10), SICK, 0) == [False, True]


def test_a_quarantine_is_reported_at_once() -> None:
    offers = Offers(10)
    health(offers, TWO, 0)
    assert health(offers, SICK, 1, quarantine=(FIRST,)) == [False, True]


def test_fatal_errors_are_reported_at_once() -> None:
    """They stay counted until a release; a reset is over in a second."""
    offers = Offers(10)
    health(offers, TWO, 0)
    unit = replace(TWO.units[0], reasons=(blocker("fatal-errors", FIRST, "had 1 error", "wait"),))
    failed = replace(TWO, units=(unit, *TWO.units[1:]))
    assert health(offers, failed, 1) == [False, True]


def test_reasons_of_a_device_that_is_still_offered_are_not_shown() -> None:
    offers = Offers(10)
    health(offers, TWO, 0)
    offered = offers.merge(Inventory((SICK,)), {}, (), 1)
    assert next(offered.units).reasons == ()


def test_a_device_that_a_pod_has_by_another_name_is_not_given_again() -> None:
    offers = Offers(10)
    health(offers, TWO, 0)
    renamed = NodeResource("example.com/GPU", TWO.units)
    offered = offers.merge(Inventory((renamed,)), {(NAME, FIRST): "default/cuda/c0"}, (), 1)
    first, second = offered.units
    assert [reason.rule for reason in first.reasons] == ["other-resource"]
    assert second.is_healthy
    assert health(offers, renamed, 2) == [True, True]


def test_a_device_that_a_claim_has_is_taken_at_once_and_given_again_afterwards() -> None:
    offers = Offers(10)
    health(offers, TWO, 0)
    offered = offers.merge(Inventory((TWO,)), {}, (), 1, {FIRST: "ml/train"})
    first, second = offered.units
    assert [reason.rule for reason in first.reasons] == ["held-by-claim"]
    assert (first.used_by, first.claim) == ("claim ml/train", "ml/train")
    assert second.is_healthy
    assert health(offers, TWO, 2) == [True, True]


def test_a_device_of_a_pod_and_of_a_claim_stays_with_the_pod() -> None:
    pods = replace(TWO, units=tuple(replace(unit, pod="ml/train-0/c0") for unit in TWO.units))
    offered = Offers(10).merge(Inventory((pods,)), {}, (), 1, {FIRST: "ml/train"})
    assert all(unit.is_healthy for unit in offered.units)


def test_an_inventory_without_units_has_no_empty_resources() -> None:
    found = Inventory((TWO, NodeResource("example.com/GPU", TWO.units[:1])))
    (left,) = found.without({FIRST}).resources
    assert (left.name, [unit.id for unit in left.units]) == (NAME, [SECOND])
    assert found.without({"other"}) is found
