"""Libvirts that are stuck: real sockets, and a real libvirtd that is stopped."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.integration.embed import AS_USER
from vfiomgr.errors import LibvirtSilent
from vfiomgr.libvirt.attach.claims import Scope
from vfiomgr.libvirt.client import binding
from vfiomgr.libvirt.client.connection import connect

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SOON = 15.0
"""Seconds that all may take on a busy machine."""


@pytest.fixture
def deaf(tmp_path: Path) -> Iterator[str]:
    """The URI of a socket that takes connections and never answers."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "deaf"))
        listening.listen()
        yield f"qemu+unix:///system?socket={tmp_path}/deaf"


@dataclass(frozen=True)
class Daemon:
    """A libvirtd with a user's rights, and libvirt's test driver behind it."""

    process: subprocess.Popen[bytes]
    uri: str

    def stop(self) -> None:
        """It is there, and does nothing."""
        self.process.send_signal(signal.SIGSTOP)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    assert shutil.which("libvirtd"), "tests/lab/packages.txt has it: tools/setup dev installs it"
    (tmp_path / "libvirtd.conf").write_text(f'log_outputs = "3:file:{tmp_path}/log"\n')
    arguments = ["-f", str(tmp_path / "libvirtd.conf"), "-p", str(tmp_path / "pid")]
    path = tmp_path / "libvirt/libvirt-sock"
    with subprocess.Popen(
        [*AS_USER, "libvirtd", *arguments],
        env={**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    ) as process:
        while not path.exists():
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        yield Daemon(process, f"test+unix:///default?socket={path}")
        process.kill()


def test_a_command_ends_where_libvirt_never_answers(deaf: str) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "vfiomgr", "libvirt", "list", "-c", deaf, "--timeout", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (answer.returncode, answer.stdout) == (1, "")
    assert f"libvirtd at {deaf} did not answer within 1 s" in answer.stderr
    assert "systemctl status libvirtd virtqemud" in answer.stderr
    assert "pass --timeout SECONDS to wait longer" in answer.stderr


@pytest.mark.parametrize("with_events", [False, True])
def test_a_daemon_that_stops_in_the_middle_is_asked_once(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, *, with_events: bool
) -> None:
    with connect(daemon.uri, with_events=with_events, deadline=1) as connection:
        assert connection.domain_names() == ("test",)
        daemon.stop()
        with pytest.raises(LibvirtSilent, match="did not answer within 1 s"):
            connection.domain_names()
        monkeypatch.delattr(binding._Conversation, "_put")  # nothing can be asked any more
        with pytest.raises(LibvirtSilent, match="did not answer within 1 s"):
            connection.attach("test", "<hostdev/>", Scope(live=True, config=False))
        monkeypatch.undo()


_PROGRAM = """\
import os, signal, sys
from vfiomgr.libvirt.client.connection import connect
from vfiomgr.errors import LibvirtSilent
with connect(sys.argv[1], deadline=1) as connection:
    assert connection.domain_names() == ("test",)
    os.kill(int(sys.argv[2]), signal.SIGSTOP)
    try:
        connection.domain_names()
    except LibvirtSilent:
        print("silent")
"""


def test_a_process_ends_though_its_connection_cannot_be_closed(daemon: Daemon) -> None:
    command = [sys.executable, "-c", _PROGRAM, daemon.uri, str(daemon.process.pid)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SOON)
    assert (answer.returncode, answer.stdout) == (0, "silent\n"), answer.stderr


def test_a_call_that_may_take_long_ends_when_its_daemon_is_lost(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(binding, "KEEP_ALIVE", (1, 1))
    monkeypatch.setattr(binding, "KEEP_ALIVE", (1, 1))
    with connect(daemon.uri, deadline=600) as connection:
        daemon.stop()
        with pytest.raises(LibvirtSilent, match="did not answer within 2 s"):
            connection.domain_names()


def test_a_call_that_is_not_answered_can_be_interrupted(daemon: Daemon) -> None:
    interrupt = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT])
    with connect(daemon.uri, deadline=600) as connection:
        daemon.stop()
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            connection.domain_names()


def test_a_daemon_that_goes_on_in_time_is_waited_for(daemon: Daemon) -> None:
    with connect(daemon.uri, deadline=60) as connection:
        daemon.stop()
        waker = threading.Timer(1, daemon.process.send_signal, [signal.SIGCONT])
        waker.start()
        assert connection.domain_names() == ("test",)
        waker.join()


def test_the_hint_names_the_host_where_it_is_another() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        uri = f"qemu+tcp://127.0.0.1:{listening.getsockname()[1]}/system"
        with pytest.raises(LibvirtSilent) as caught, connect(uri, deadline=0.5):
            pass
    assert "check that 127.0.0.1 is up" in caught.value.hint
    assert "ssh 127.0.0.1 'systemctl status libvirtd" in caught.value.hint
