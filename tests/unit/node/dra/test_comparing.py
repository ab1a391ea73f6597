"""What is the same in a slice as it is sent and as it is stored."""

from __future__ import annotations

from typing import Any

import pytest

from vfiomgr.node.dra.slices import comparable, with_times

TAINT = {"key": "vfiomgr.io/health", "value": "lost", "effect": "NoExecute"}
TIMED = {**TAINT, "timeAdded": "2026-01-02T03:04:05Z"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("17179869184", "16Gi"),
        ("8000000000", "8G"),
        ("1024Mi", "1Gi"),
        ("1500m", "1.5"),
        ("1e3", "1k"),
        ("0", "0"),
    ],
)
def test_equal_quantities_are_the_same(one: str, other: str) -> None:
    for field in ("capacity", "counters"):
        left, right = ({field: {"memory": {"value": each}}} for each in (one, other))
        assert comparable(left) == comparable(right)


def test_other_quantities_and_texts_differ() -> None:
    assert comparable({"capacity": {"a": {"value": "1Gi"}}}) != comparable(
        {"capacity": {"a": {"value": "1G"}}}
    )
    one, other = ({"attributes": {"a": {"string": each}}} for each in ("1000", "1k"))
    assert comparable(one) != comparable(other)
    left, right = ({"taints": [{**TAINT, "value": each}]} for each in ("1000", "1k"))
    assert comparable(left) != comparable(right)
    assert comparable({"capacity": {"a": {"value": "much"}}}) == {
        "capacity": {"a": {"value": "much"}}
    }


def test_empty_fields_and_times_are_left_out_but_not_false() -> None:
    stored = {"devices": [{"name": "a", "taints": [TIMED], "attributes": {"x": {"bool": False}}}]}
    sent = {
        "devices": [
            {"name": "a", "taints": [TAINT], "attributes": {"x": {"bool": False}}, "capacity": {}}
        ],
        "sharedCounters": [],
        "nodeSelector": None,
    }
    assert comparable(stored) == comparable(sent)
    sent["devices"][0]["attributes"] = {"x": {"bool": True}}  # type: ignore[index]
    assert comparable(stored) != comparable(sent)


def test_a_taint_keeps_its_time_on_its_device_only() -> None:
    other = {**TAINT, "value": "slow"}
    held: list[dict[str, Any]] = [
        {"spec": {"devices": [{"name": "a", "taints": [TIMED]}, {"name": "c"}]}},
        {"spec": {"sharedCounters": []}},
    ]
    sent = {
        "devices": [
            {"name": "a", "taints": [other, TAINT]},
            {"name": "b", "taints": [TAINT]},
            {"name": "c"},
        ]
    }
    assert with_times(sent, held) == {
        "devices": [
            {"name": "a", "taints": [other, TIMED]},
            {"name": "b", "taints": [TAINT]},
            {"name": "c"},
        ]
    }
    counters = {"sharedCounters": [{"name": "gpu"}]}
    assert with_times(counters, held) == counters
