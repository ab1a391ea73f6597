"""How long devices are withheld, and that this outlives the agent."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from vfiomgr.diagnostic import blocker
from vfiomgr.host.tree import HostTree
from vfiomgr.node.health import EVERY
from vfiomgr.node.offers import FILE, Quarantine

if TYPE_CHECKING:
    from pathlib import Path

GPU, OTHER = "0000:41:00.0", "0000:42:00.0"
REASON = blocker("reset-failed", GPU, f"cannot reset {GPU}: timeout", "power-cycle it")


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    (tmp_path / "sys").mkdir()
    return HostTree(tmp_path)


def test_a_quarantine_ends_by_itself_and_is_longer_the_next_time(tree: HostTree) -> None:
    quarantine = Quarantine(tree, 0)
    assert quarantine.add(GPU, REASON, 0) == 60
    assert quarantine.active(59) == {GPU: REASON}
    assert quarantine.active(60) == {}
    assert quarantine.add(GPU, REASON, 100) == 120
    assert [quarantine.add(GPU, REASON, 200) for _ in range(6)][-1] == 3600


def test_a_calm_day_shortens_the_next_quarantine(tree: HostTree) -> None:
    quarantine = Quarantine(tree, 0)
    quarantine.add(GPU, REASON, 0)
    assert quarantine.add(GPU, REASON, 86_400) == 60


def test_a_quarantine_outlives_the_agent(tree: HostTree) -> None:
    Quarantine(tree, 0).add(GPU, REASON, 0)
    again = Quarantine(tree, 0)
    assert again.active(1) == {GPU: REASON}
    assert again.add(GPU, REASON, 2) == 120
    assert tree.status(FILE).st_mode & 0o777 == 0o600  # type: ignore[union-attr]


def test_a_released_device_starts_from_the_beginning(tree: HostTree) -> None:
    quarantine = Quarantine(tree, 0)
    quarantine.add(GPU, REASON, 0)
    assert quarantine.release(GPU)
    assert not quarantine.release(GPU)
    assert Quarantine(tree, 0).active(1) == {}
    assert quarantine.add(GPU, REASON, 2) == 60


OLD = """{
  "devices": {
    "0000:41:00.0": {
      "reason": {
        "rule": "reset-failed",
        "severity": "blocker",
        "subject": "0000:41:00.0",
        "summary": "cannot reset 0000:41:00.0: timeout",
        "evidence": [],
        "why": "",
        "remedies": [
          {
            "text": "power-cycle it",
            "option": null,
            "then": "",
            "joint": ", or "
          }
        ],
        "override": null,
        "place": null
      },
      "until": 60.0,
      "count": 1
    }
  }
}
"""
"""As written by the first agents."""


def test_the_form_of_the_file_stays(tree: HostTree) -> None:
    Quarantine(tree, 0).add(GPU, REASON, 0)
    assert tree.read_text(FILE) == OLD
    tree.replace(FILE, OLD.encode(), mode=0o600)
    again = Quarantine(tree, 0)
    assert (again.active(59), again.unreadable) == ({GPU: REASON}, None)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"devices": 7}', '{"devices": {"x": {}}}', "[" * 10_000, "\0"),
        OLD.replace('"count"', '"number"'),
        OLD.partition(":")[2][:-2],  # without the wrapper
    ],
)
def test_a_file_that_cannot_be_read_withholds_all_devices(text: str, tree: HostTree) -> None:
    Quarantine(tree, 0).add(GPU, REASON, 0)
    tree.replace(FILE, text.encode(), mode=0o600)
    quarantine = Quarantine(tree, 100)
    assert quarantine.unreadable is not None
    assert f"cannot read {FILE}: " in quarantine.unreadable.summary
    assert quarantine.active(3699) == {EVERY: quarantine.unreadable}
    assert quarantine.end(3699) == 3700
    assert quarantine.active(3700) == {}


def test_no_file_is_no_quarantine(tree: HostTree) -> None:
    quarantine = Quarantine(tree, 0)
    assert (quarantine.active(0), quarantine.unreadable) == ({}, None)


def test_a_link_in_the_place_of_the_file_withholds_all_devices(tree: HostTree) -> None:
    tree.make_directory(FILE.parent)
    os.symlink("other", tree.locate(FILE))
    assert Quarantine(tree, 0).active(1).keys() == {EVERY}


def test_the_release_of_one_of_all_devices_keeps_the_others(tree: HostTree) -> None:
    tree.make_directory(FILE.parent)
    tree.replace(FILE, b"", mode=0o600)
    quarantine = Quarantine(tree, 0)
    quarantine.add(OTHER, REASON, 0)
    assert Quarantine(tree, 0).active(1).keys() == {EVERY, OTHER}
    assert quarantine.release(GPU, (GPU, OTHER, "0000:43:00.0"))
    again = Quarantine(tree, 0)
    assert again.active(3599).keys() == {OTHER, "0000:43:00.0"}
    assert again.active(3600) == {}
    assert again.release(OTHER, (GPU, OTHER, "0000:43:00.0"))
    assert again.active(1).keys() == {"0000:43:00.0"}
