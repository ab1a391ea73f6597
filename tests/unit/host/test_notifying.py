"""Notifications of systemd, received by a socket."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vfiomgr.host.notifying import notify, watchdog_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory with a short path, as sockets need."""
    with tempfile.TemporaryDirectory(prefix="k", dir=tmp_path.parents[2]) as name:
        yield Path(name)


@pytest.mark.parametrize("is_abstract", [False, True])
def test_a_state_is_sent(
    place: Path, monkeypatch: pytest.MonkeyPatch, *, is_abstract: bool
) -> None:
    name = f"{place}/n"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"\0{name}" if is_abstract else name)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}" if is_abstract else name)
        notify("READY=1")
        assert receiver.recv(100) == b"READY=1"


def test_a_systemd_that_does_not_read_is_not_waited_for(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(f"{place}/n")
        monkeypatch.setenv("NOTIFY_SOCKET", f"{place}/n")
        for _ in range(2000):  # more than a queue has room for (net.unix.max_dgram_qlen)
            notify("WATCHDOG=1")
        assert receiver.recv(100) == b"WATCHDOG=1"


@pytest.mark.parametrize("name", ["", "relative", "/none/such"])
def test_without_systemd_nothing_happens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", name)
    notify("READY=1")


def test_the_interval_of_the_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    assert watchdog_seconds() == 60
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() + 1))
    assert watchdog_seconds() is None
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert watchdog_seconds() == 60
    monkeypatch.setenv("WATCHDOG_USEC", "no")
    assert watchdog_seconds() is None
