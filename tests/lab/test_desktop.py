"""The console's card goes to a guest and returns, for real: `bind --release`, and every kill."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random, SystemRandom
from typing import TYPE_CHECKING

import pytest

from tests import api
from tests.lab import desktop, hooked
from tests.lab.command import vfiomgr
from tests.lab.deaths import TREE
from tests.lab.desktop import Screen, until
from tests.lab.resident import Resident
from vfiomgr.libvirt.model import HookSettings
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.pci.model import PciAddress
from vfiomgr.users.released import RELEASED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.lab.topology import Topology

pytestmark = [pytest.mark.topology("services"), pytest.mark.platforms("debian12")]

_GROUPS = Path("/sys/fs/cgroup")
_KILLS = 16
_KILLED = _GROUPS / "killed"
_SETTINGS = HookSettings(release=True, end_sessions=True)
_TERMINAL = _GROUPS / "user.slice" / "terminal.scope"


@pytest.fixture(scope="module")
def screen(topology: Topology) -> Iterator[Screen]:
    """The only display of the host."""
    with desktop.only_screen(topology) as found:
        yield found


@pytest.fixture(autouse=True)
def _screen_is_back(screen: Screen) -> None:
    if screen.driver == "vfio-pci":
        vfiomgr("unbind", screen.address)
    until(lambda: screen.is_back)


def seconds_of(action: Callable[[], object]) -> float:
    begun = time.monotonic()
    action()
    return time.monotonic() - begun


def is_lent(screen: Screen) -> bool:
    return screen.driver == "vfio-pci" and not screen.has_console and not screen.is_shown


@pytest.mark.parametrize("rounds", [1, pytest.param(10, marks=pytest.mark.thorough)])
def test_the_card_goes_to_a_guest_and_the_desktop_is_back_after_it(
    screen: Screen, rounds: int
) -> None:
    for number in range(1, rounds + 1):
        going = seconds_of(lambda: vfiomgr("bind", "--release", screen.address, "--yes"))
        assert is_lent(screen)
        with hooked.guest(screen.address):
            vfiomgr("unbind", screen.address, status=4)
            assert is_lent(screen)
        returning = seconds_of(lambda: vfiomgr("unbind", screen.address))
        shown = until(lambda: screen.is_back)
        print(
            f"round {number}: bind --release {going:.1f} s, unbind {returning:.1f} s, "
            f"X server {shown:.1f} s later"
        )


# ---- kills


def is_killed(change: Callable[[], object], delay: float) -> bool:
    """Whether a change, in a child that is killed with all of its children, had not ended."""
    _KILLED.mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        try:
            (_KILLED / "cgroup.procs").write_text(str(os.getpid()))
            change()
        finally:
            os._exit(0)  # never a second copy of the tests
    time.sleep(delay)
    (_KILLED / "cgroup.kill").write_text("1")
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


class Changes:
    """Both ways of the card, and how long they take."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        address = PciAddress.parse(screen.address)
        bind, unbind = Bind((address,), release=True), Unbind((address,))
        self.bind: Callable[[], object] = lambda: api.apply(bind, tree=TREE)
        self.unbind: Callable[[], object] = lambda: api.apply(unbind, tree=TREE)
        self.durations = [seconds_of(one) for one in (self.bind, self.unbind)]
        until(lambda: screen.is_back)

    def return_card(self) -> None:
        """Unbind it if it is lent."""
        if self.screen.driver != "bochs-drm":
            self.unbind()


@pytest.mark.thorough
def test_a_killed_run_is_undone_by_recover_and_the_screen_is_back(screen: Screen) -> None:
    changes = Changes(screen)
    seed = SystemRandom().getrandbits(32)
    random = Random(seed)  # noqa: S311 - no secret
    for number in range(_KILLS):
        is_return = number % 2 == 1
        change = changes.unbind if is_return else changes.bind
        if is_return:
            changes.bind()
        delay = random.uniform(0, changes.durations[number % 2])
        died = is_killed(change, delay)
        at = f"{'unbind' if is_return else 'bind --release'} killed after {delay:.1f} s"
        state = screen.driver
        recovered = api.recover(tree=TREE)
        if is_return and recovered:
            assert screen.driver == "bochs-drm", seed  # finished: the screen is more urgent
        changes.return_card()
        shown = until(lambda: screen.is_back)
        print(
            f"{at}: {'' if died else 'had ended, '}card on {state or 'no driver'}, "
            f"{len(recovered)} ended by recover, screen {shown:.1f} s later"
        )


# ---- a terminal in a session


@contextmanager
def service_of(screen: Screen) -> Iterator[Path]:
    """The control group of the service that goes on after the death of its terminal."""
    name = screen.address.replace(":", "-").replace(".", "-")
    group = _GROUPS / "system.slice" / f"vfiomgr-release-{name}.service"
    scope = ("systemd-run", "--quiet", "--scope", "--slice=user.slice", "--unit=terminal.scope")
    terminal = Resident(*scope)
    terminal.begin("bind", "--release", screen.address, "--yes")
    until(group.exists)
    (_TERMINAL / "cgroup.kill").write_text("1")
    terminal.end()
    yield group
    until(lambda: not group.exists())


@pytest.mark.thorough
def test_the_card_is_released_although_the_terminal_ends(screen: Screen) -> None:
    with service_of(screen):
        pass
    assert is_lent(screen)
    vfiomgr("unbind", screen.address)
    until(lambda: screen.is_back)


@pytest.mark.parametrize("kills", [1, 4])
@pytest.mark.thorough
def test_a_killed_service_brings_the_screen_back_by_itself(screen: Screen, kills: int) -> None:
    duration = Changes(screen).durations[0]
    random = SystemRandom()
    for _ in range(kills):
        delay = random.uniform(0, duration / 2)
        with service_of(screen) as group:
            until(lambda: bool(TREE.children(RELEASED)))
            time.sleep(delay)
            with suppress(FileNotFoundError):  # it has ended meanwhile
                (group / "cgroup.kill").write_text("1")
            begun = time.monotonic()
        if screen.driver == "vfio-pci":
            print(f"service killed {delay:.1f} s after its first step, when the card was bound")
            vfiomgr("unbind", screen.address)
        until(lambda: screen.is_back)
        shown = time.monotonic() - begun
        print(f"service killed {delay:.1f} s after its first step: screen {shown:.1f} s later")


# ---- libvirt's hook


def kill_hook(screen: Screen) -> None:
    """Start the hook for a guest, and kill it at work."""
    with subprocess.Popen(hooked.command("prepare"), stdin=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(hooked.domain(screen.address, _SETTINGS))
        process.stdin.close()
        until(lambda: bool(TREE.children(RELEASED)))
        process.kill()


@pytest.mark.thorough
def test_the_hook_returns_the_screen_after_a_guest_that_ran_or_never_started(
    screen: Screen,
) -> None:
    xml = hooked.domain(screen.address, _SETTINGS)
    hooked.run_hook(xml, "prepare")
    assert is_lent(screen)
    with hooked.guest(screen.address):
        assert is_lent(screen)
    hooked.run_hook(xml, "release")
    print(f"guest killed: screen {until(lambda: screen.is_back):.1f} s after the hook")
    kill_hook(screen)
    hooked.run_hook(xml, "release")
    print(f"hook killed: screen {until(lambda: screen.is_back):.1f} s after the hook")
    assert TREE.children(RELEASED) == []
