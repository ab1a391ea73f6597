"""libvirt's hook lends the console's card, and guest, hook or libvirtd are killed: `--release`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab import desktop, hooked
from tests.lab import libvirtd as daemon
from tests.lab.command import vfiomgr
from tests.lab.deaths import TREE
from tests.lab.desktop import Screen, until
from tests.lab.nested import call
from tests.lab.test_libvirt_attach import install_hook
from vfiomgr.libvirt.hook import GUESTS
from vfiomgr.libvirt.model import HookSettings
from vfiomgr.users.released import RELEASED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lab.topology import Topology

pytestmark = [
    pytest.mark.topology("services"),
    pytest.mark.platforms("debian12"),
    pytest.mark.thorough,
]

_QEMU_PID = Path(f"/run/libvirt/qemu/{hooked.NAME}.pid")
_HOOK = b"libvirt\0hook\0run"
_LATER = 10.0


@pytest.fixture(scope="module")
def screen(topology: Topology) -> Iterator[Screen]:
    """The only display of the host, of a domain with `hook install --release --end-sessions`."""
    install_hook()
    daemon.start()
    with desktop.only_screen(topology) as found:
        settings = HookSettings(release=True, end_sessions=True)
        file = Path("/run/lab/win.xml")
        file.write_text(hooked.domain(found.address, settings))
        virsh("define", str(file))
        yield found
        virsh("undefine", hooked.NAME)
    vfiomgr("libvirt", "hook", "uninstall")


@pytest.fixture(autouse=True)
def _nothing_is_left(screen: Screen) -> Iterator[None]:
    until(lambda: screen.is_back)
    yield
    until(lambda: screen.is_back)
    assert TREE.children(RELEASED) == []
    assert list(Path(GUESTS).glob("*")) == []


def virsh(*arguments: str, status: int = 0) -> str:
    answer = call("virsh", *arguments)
    assert answer.returncode == status, answer.stderr
    return answer.stderr


def start_guest(screen: Screen) -> int:
    """Start the guest, which has the card then; returns its process."""
    virsh("start", hooked.NAME)
    assert screen.driver == "vfio-pci"
    assert not screen.has_console
    assert not screen.is_shown
    return int(_QEMU_PID.read_text())


def start_hook(screen: Screen) -> tuple[subprocess.Popen[str], int]:
    """Start the guest until its hook is at work; returns virsh and the process of vfiomgr."""
    command = ("virsh", "--connect", daemon.URI, "start", hooked.NAME)
    starting = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    until(lambda: bool(TREE.children(RELEASED)))
    assert screen.driver != "vfio-pci"
    return starting, min(_hooks())


def _hooks() -> list[int]:
    found = Path("/proc").glob("[0-9]*/cmdline")
    return [int(place.parent.name) for place in found if _HOOK in place.read_bytes()]


def kill(*pids: int) -> float:
    """Kill processes; returns when."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return time.monotonic()


def kill_libvirtd() -> float:
    process = daemon.PID.read_text().strip()
    when = kill(int(process))
    until(lambda: not Path("/proc", process).exists())
    return when


def show(what: str, screen: Screen, since: float) -> None:
    """Print what is there ten seconds later, and when all of it is."""
    time.sleep(max(0.0, since + _LATER - time.monotonic()))
    print(f"{what}: {_LATER:.0f} s later {screen}")
    until(lambda: screen.is_back)
    print(f"{what}: all of it after {time.monotonic() - since:.1f} s")


def test_the_guest_is_killed(screen: Screen) -> None:
    show("guest killed", screen, kill(start_guest(screen)))


def test_the_hook_is_killed(screen: Screen) -> None:
    starting, hook = start_hook(screen)
    since = kill(hook)
    show("hook killed", screen, since)
    _, said = starting.communicate()
    assert starting.returncode == 1
    assert "undone: " in said, said
    assert "error: no such" not in said, said


def test_libvirtd_is_killed_while_the_guest_runs(screen: Screen) -> None:
    guest = start_guest(screen)
    kill_libvirtd()
    time.sleep(_LATER)
    print(f"libvirtd killed: {_LATER:.0f} s later the guest runs, and {screen}")
    assert screen.driver == "vfio-pci"
    daemon.start()
    assert screen.driver == "vfio-pci"
    show("then the guest", screen, kill(guest))


def test_libvirtd_and_the_guest_are_killed(screen: Screen) -> None:
    guest = start_guest(screen)
    kill_libvirtd()
    kill(guest)
    since = time.monotonic()
    daemon.start()
    show("libvirtd and guest killed, libvirtd started", screen, since)


def test_libvirtd_is_killed_while_the_hook_works(screen: Screen) -> None:
    starting, _ = start_hook(screen)
    since = kill_libvirtd()
    show("libvirtd killed at the start of the guest", screen, since)
    starting.communicate()
    assert starting.returncode == 1
    daemon.start()
