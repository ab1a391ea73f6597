"""systemd as the first process of a guest, for tests of services as they are installed.

The guest's first process is a script (guest/enter). It is replaced when a test of the topology
`services` needs it, and stays for the tests after it. Of the system's units none runs: what a unit
has of its own (sandbox, directories, control group, watchdog) is real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

UNITS = Path("/run/systemd/system")
_TARGET = "lab.target"
_SECONDS = 300.0


def start_manager() -> None:
    """Let systemd be the first process, if it is not yet."""
    if UNITS.exists():
        return
    UNITS.mkdir(parents=True)
    (UNITS / _TARGET).write_text("[Unit]\nDescription=Laboratory\nDefaultDependencies=no\n")
    for directory in ("/lib/systemd/system", "/etc/systemd/system"):
        for wanted in Path(directory).glob("*.wants/*"):
            if wanted.suffix != ".target" and not (UNITS / wanted.name).is_symlink():
                (UNITS / wanted.name).symlink_to("/dev/null")  # masked (systemd.unit(5))
    os.kill(1, signal.SIGUSR1)
    end = time.monotonic() + _SECONDS
    while systemctl("is-active", _TARGET, must_work=False) != "active":
        assert time.monotonic() < end, "systemd has not started in time"
        time.sleep(0.5)


def start_unit(name: str, text: str) -> None:
    """Write a unit and start it, until it is active."""
    (UNITS / name).write_text(text)
    systemctl("daemon-reload")
    systemctl("start", name, must_work=False)
    state = systemctl("status", "--no-pager", name, must_work=False)
    assert "Active: active" in state, state


def stop_unit(name: str) -> None:
    """Stop a unit, and remove it."""
    systemctl("stop", name)
    (UNITS / name).unlink()
    systemctl("daemon-reload")


def main_pid(name: str) -> int:
    """The PID of the main process of a service."""
    return int(systemctl("show", "--value", "--property=MainPID", name))


def systemctl(*arguments: str, must_work: bool = True) -> str:
    """Run systemctl, and return what it prints."""
    result = subprocess.run(("systemctl", *arguments), check=False, capture_output=True, text=True)
    assert not must_work or result.returncode == 0, f"systemctl {arguments}: {result.stderr}"
    return result.stdout.strip()
