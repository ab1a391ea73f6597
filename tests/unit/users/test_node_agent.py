"""Whether an agent serves its socket."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from vfiomgr.errors import UsageError
from vfiomgr.host.tree import HostTree
from vfiomgr.users.node_agent import CONTROL, is_running, release

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


@pytest.mark.parametrize("name", ["\udcff", "0000:01:00.0\r\n", "\x1b[1m"])
def test_a_name_that_is_no_text_is_not_sent_to_the_agent(name: str) -> None:
    with pytest.raises(UsageError, match="not a device of the agent"):
        release("/nowhere", name)
