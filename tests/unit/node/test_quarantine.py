"""How long devices are withheld, and that this outlives the agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from vfiomgr.diagnostic import blocker
from vfiomgr.host.tree import HostTree
from vfiomgr.node.offers import FILE, Quarantine

if TYPE_CHECKING:
    from pathlib import Path

GPU = "0000:41:00.0"
REASON = blocker("reset-failed", GPU, f"cannot reset {GPU}: timeout", "power-cycle it")


@pytest.fixture
def tree(tmp_path: Path) -> HostTree:
    (tmp_path / "sys").mkdir()
    return HostTree(tmp_path)


def test_a_quarantine_ends_by_itself_and_is_longer_the_next_time(tree: HostTree) -> None:
    quarantine = Quarantine(tree)
    assert quarantine.add(GPU, REASON, 0) == 60
    assert quarantine.active(59) == {GPU: REASON}
    assert quarantine.active(60) == {}
    assert quarantine.add(GPU, REASON, 100) == 120
    assert [quarantine.add(GPU, REASON, 200) for _ in range(6)][-1] == 3600


def test_a_calm_day_shortens_the_next_quarantine(tree: HostTree) -> None:
    quarantine = Quarantine(tree)
    quarantine.add(GPU, REASON, 0)
    assert quarantine.add(GPU, REASON, 86_400) == 60


def test_a_quarantine_outlives_the_agent(tree: HostTree) -> None:
    Quarantine(tree).add(GPU, REASON, 0)
    again = Quarantine(tree)
    assert again.active(1) == {GPU: REASON}
    assert again.add(GPU, REASON, 2) == 120
    assert tree.status(FILE).st_mode & 0o777 == 0o600  # type: ignore[union-attr]


def test_a_released_device_starts_from_the_beginning(tree: HostTree) -> None:
    quarantine = Quarantine(tree)
    quarantine.add(GPU, REASON, 0)
    assert quarantine.release(GPU)
    assert not quarantine.release(GPU)
    assert Quarantine(tree).active(1) == {}
    assert quarantine.add(GPU, REASON, 2) == 60


@pytest.mark.parametrize("text", ["", "[]", '{"devices": 7}', '{"devices": {"x": {}}}'])
def test_a_damaged_file_is_no_quarantine(text: str, tree: HostTree) -> None:
    Quarantine(tree).add(GPU, REASON, 0)
    tree.replace(FILE, text.encode())
    assert Quarantine(tree).active(1) == {}
