"""Whether an agent serves its socket."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from vfiomgr.host.tree import HostTree
from vfiomgr.users.node_agent import CONTROL, is_running

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("length", [1, 200])
def test_an_agent_runs_where_its_socket_is_served_however_long_the_path_of_the_root(
    tmp_path: Path, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / ("r" * length)
    root.mkdir()
    assert not is_running(HostTree(root))
    directory = root / CONTROL.parent.lstrip("/")
    directory.mkdir(parents=True)
    assert not is_running(HostTree(root))
    monkeypatch.chdir(directory)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(CONTROL.name)
        server.listen()
        assert is_running(HostTree(root))
    assert not is_running(HostTree(root))
