from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.host.tree import HostTree
from vfiomgr.host.uevents import is_settled
from vfiomgr.model.path import HostPath

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

NODE = HostPath("/dev/vfio/7")


def test_another_host_has_no_udevd_to_wait_for(tmp_path: Path) -> None:
    assert is_settled(HostTree(tmp_path), NODE)


def test_a_node_that_udevd_does_not_know_is_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = HostTree("/")
    monkeypatch.setattr(tree, "exists", lambda _path: True)
    assert not is_settled(tree, HostPath("/dev/no-such-node"))


def test_without_udevd_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = HostTree("/")
    monkeypatch.setattr(tree, "exists", lambda _path: False)
    assert is_settled(tree, HostPath("/dev/no-such-node"))
