"""Which guests have crashed, as far as the open nodes and the kubelet's list of pods show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests.unit.node.stories import unit
from vfiomgr.node.offers import SETTLE, Sandboxes
from vfiomgr.users.model import DeviceUser

if TYPE_CHECKING:
    from vfiomgr.node.model import NodeUnit

GPU = unit(1)
TRAIN = replace(GPU, pod="ml/train-0/c0")
CLAIMED = replace(GPU, claim="ml/gpu")
FIRST, SECOND = f"sandbox-{'a' * 64}", f"sandbox-{'b' * 64}"


def guest(name: str | None, pid: int = 7) -> DeviceUser:
    return DeviceUser("/dev/vfio/1", pid, "qemu", guest=name)


class Told:
    """Scans one after the other, and what they say."""

    def __init__(self) -> None:
        self.living: set[tuple[str, int]] = set()
        """Guests that run although they may have no device, and their processes."""
        self.sandboxes = Sandboxes(
            lambda name, pids: any((name, pid) in self.living for pid in pids)
        )
        self.withheld: set[str] = set()
        self.claims = {"ml/gpu": "ml/train-0"}

    def scan(self, now: float, found: NodeUnit, *users: DeviceUser) -> str:
        """What is said about the device."""
        by_unit = {found.id: users} if users else {}
        crashes = self.sandboxes.crashes([found], by_unit, self.withheld, now, self.claims)
        (reason,) = crashes.values() or (None,)
        return "" if reason is None else reason.summary


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.mark.parametrize("given", [TRAIN, CLAIMED], ids=["device plugin", "claim"])
def test_another_guest_of_the_pod_replaces_one_that_crashed(told: Told, given: NodeUnit) -> None:
    assert told.scan(0, given, guest(FIRST)) == ""
    assert told.scan(1, given, guest(FIRST)) == ""
    said = told.scan(2, given, guest(SECOND, 8))
    assert said == f"guest {FIRST} of pod ml/train-0 ended while the pod had {GPU.id}"
    assert told.scan(3, given, guest(SECOND, 8)) == ""


def test_the_next_pod_of_a_claim_has_a_guest_of_its_own(told: Told) -> None:
    told.scan(0, CLAIMED, guest(FIRST))
    told.claims = {"ml/gpu": "ml/train-1"}
    assert told.scan(1, CLAIMED, guest(SECOND, 8)) == ""


def test_guests_of_a_claim_that_several_pods_share_are_not_compared(told: Told) -> None:
    told.claims = {}
    told.scan(0, CLAIMED, guest(FIRST))
    assert told.scan(1, CLAIMED, guest(SECOND, 8)) == ""


def test_a_second_pod_of_a_claim_does_not_end_the_first(told: Told) -> None:
    alone = dict(told.claims)
    told.scan(0, CLAIMED, guest(FIRST))
    told.claims = {}
    for now in (1, 1 + SETTLE, 1 + 2 * SETTLE):
        assert told.scan(now, CLAIMED, guest(FIRST)) == ""
    assert not told.sandboxes.is_waiting
    told.claims = alone
    assert told.scan(2 + 2 * SETTLE, CLAIMED, guest(FIRST)) == ""
    assert FIRST in told.scan(3 + 2 * SETTLE, CLAIMED, guest(SECOND, 8))


def test_a_process_that_outlives_the_pod_of_its_claim_keeps_the_device_withheld(told: Told) -> None:
    told.scan(0, CLAIMED, guest(None, 7))
    told.claims = {}
    told.scan(1, GPU, guest(None, 7))
    said = told.scan(1 + SETTLE, GPU, guest(None, 7))
    assert said == f"pod ml/train-0 ended, and PID 7 still has {GPU.id} open"


def test_a_guest_that_does_not_return_has_crashed_after_a_while_and_once(told: Told) -> None:
    told.scan(0, TRAIN, guest(FIRST))
    assert not told.sandboxes.is_waiting
    assert told.scan(10, TRAIN) == ""
    assert told.sandboxes.is_waiting
    assert told.scan(10 + SETTLE - 0.1, TRAIN) == ""
    assert FIRST in told.scan(10 + SETTLE, TRAIN)
    assert told.scan(10 + 3 * SETTLE, TRAIN) == ""
    assert not told.sandboxes.is_waiting


def test_a_closed_device_of_a_living_guest_is_no_crash(told: Told) -> None:
    told.living = {(FIRST, 7)}
    told.scan(0, TRAIN, guest(FIRST))
    assert told.scan(1, TRAIN) == ""
    assert not told.sandboxes.is_waiting
    assert told.scan(1 + 2 * SETTLE, TRAIN) == ""
    assert told.scan(2 + 2 * SETTLE, TRAIN, guest(FIRST)) == ""
    assert told.scan(3 + 2 * SETTLE, TRAIN) == ""
    told.living = {(SECOND, 7), (FIRST, 8)}
    assert told.scan(4 + 2 * SETTLE, TRAIN) == ""
    assert FIRST in told.scan(4 + 3 * SETTLE, TRAIN)


def test_a_guest_that_ends_with_its_pod_has_not_crashed(told: Told) -> None:
    told.scan(0, TRAIN, guest(FIRST))
    told.scan(1, TRAIN)
    assert told.scan(2 * SETTLE, GPU) == ""
    assert told.scan(4 * SETTLE, TRAIN, guest(SECOND)) == ""


def test_the_next_pod_of_the_same_name_has_a_guest_of_its_own(told: Told) -> None:
    told.scan(0, TRAIN, guest(FIRST))
    told.sandboxes.forget([GPU.id])
    assert told.scan(1, TRAIN, guest(SECOND)) == ""


def test_another_pod_has_a_guest_of_its_own(told: Told) -> None:
    told.scan(0, TRAIN, guest(FIRST))
    assert told.scan(1, replace(GPU, pod="ml/other/c0"), guest(SECOND)) == ""


def test_a_container_without_a_guest_may_start_again(told: Told) -> None:
    told.scan(0, TRAIN, guest(None, 7))
    assert told.scan(1, TRAIN, guest(None, 8)) == ""
    told.scan(2, TRAIN)
    assert told.scan(2 + 2 * SETTLE, TRAIN) == ""


def test_a_process_that_outlives_its_pod_keeps_the_device_withheld(told: Told) -> None:
    told.scan(0, TRAIN, guest(None, 7))
    assert told.scan(1, GPU, guest(None, 7)) == ""
    said = told.scan(1 + SETTLE, GPU, guest(None, 7))
    assert said == f"pod ml/train-0 ended, and PID 7 still has {GPU.id} open"
    told.withheld = {GPU.id}
    assert told.scan(1 + 3 * SETTLE, GPU, guest(None, 7)) == ""
    told.withheld = set()
    assert "still has" in told.scan(1 + 5 * SETTLE, GPU, guest(None, 7))
    assert told.scan(1 + 7 * SETTLE, GPU) == ""
    assert told.scan(1 + 9 * SETTLE, GPU, guest(None, 7)) == ""


def test_the_process_of_the_next_pod_is_not_one_of_the_last(told: Told) -> None:
    told.scan(0, TRAIN, guest(FIRST, 7))
    assert told.scan(1, GPU, guest(SECOND, 8)) == ""
    assert told.scan(1 + 2 * SETTLE, GPU, guest(SECOND, 8)) == ""
