"""Units and sessions of a desktop that do not behave: `bind --release` and its return."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from tests import api
from tests.fakes import desktop as desktops
from tests.fakes.live_desktop import LiveDesktop
from tests.fakes.sysfs import reject
from tests.unit.passthrough.test_release import (
    FIRST,
    RELEASE,
    SECOND,
    SECOND_TOO,
    bind,
    driver,
    unbind,
)
from vfiomgr.errors import RolledBack

if TYPE_CHECKING:
    from pathlib import Path

    from tests.fakes.drivers import Driver
    from tests.unit.conftest import Run
    from vfiomgr.engine.plan import Step


def test_programs_that_a_closed_session_leaves_end_with_its_scope(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    live.closing.add("2")
    bind(live)
    assert driver(live) == "vfio-pci"
    assert live.log == ["stop gdm.service", "end session 2"]


def test_a_display_manager_that_failed_too_often_starts_when_its_card_returns(
    tmp_path: Path,
) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    bind(live)
    live.limited.add("gdm.service")
    unbind(live)
    assert live.is_active("gdm.service")


def test_a_display_manager_that_ends_without_its_card_starts_when_it_returns(
    tmp_path: Path,
) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path, cards=2))
    bind(live, SECOND_TOO)
    live.stop("gdm.service")
    unbind(live, SECOND)
    assert live.is_active("gdm.service")


def _second_session(live: LiveDesktop) -> None:
    """Another person logs in, whose compositor gets the card from logind."""
    desktop = live.desktop
    desktop.node("226:0", "card0")
    more = {"USER": "bob", "UID": "1001", "VTNR": "3", "SERVICE": "login", "DEVICES": "226:0"}
    desktop.session("5", **more)


def test_a_session_that_began_after_the_question_does_not_end(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    asked: list[str] = []

    def agree(question: str, **_: object) -> bool:
        asked.append(question)
        if len(asked) == 1:
            _second_session(live)
        return True

    monkeypatch.setattr("vfiomgr.snapshot.source.HostTree", lambda _root: live.kernel)
    monkeypatch.setattr("vfiomgr.engine.changes.sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.confirm", agree)
    refused = run("bind", "--release", str(FIRST))
    assert refused.status == 4
    assert "session 5 of bob began after the question" in refused.stderr
    assert live.log == []
    assert run("bind", "--release", str(FIRST)).status == 0
    assert asked[1].startswith("This will end session 2 of anna and end session 5 of bob;")
    assert live.log == ["stop gdm.service", "end session 2", "end session 5"]


def test_a_greeter_that_began_after_the_question_ends_with_its_display_manager(
    tmp_path: Path,
) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    live.desktop.node("226:0", "card0")
    live.desktop.session("c1", UID="42", USER="gdm", CLASS="greeter", DEVICES="226:0")
    bind(live, replace(RELEASE, agreed=("2",)))
    assert live.log == ["stop gdm.service", "end session 2", "end session c1"]


def test_a_session_that_begins_during_the_release_ends_it(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))

    def begin(step: Step) -> None:
        if step.kind == "await-closed":
            _second_session(live)

    with pytest.raises(RolledBack, match="session 5 of bob began after the question"):
        api.apply(replace(RELEASE, agreed=("2",)), tree=live.kernel, on_step=begin)
    assert live.log == ["stop gdm.service", "end session 2", "start gdm.service"]
    assert driver(live) == "amdgpu"


@pytest.mark.parametrize("refusals", [1, 2, 9])
def test_a_driver_that_refuses_its_card_after_the_guest_gets_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusals: int
) -> None:
    """Once, until the bus is scanned, and for ever; the audio function is left alone."""
    live = LiveDesktop(desktops.gnome(tmp_path))
    bind(live)
    kernel, left = live.kernel, [refusals]
    attach, plug = kernel.drivers._attach, kernel.plug

    def refuse(driver: Driver, address: str) -> None:
        if driver.name == "amdgpu" and left[0] > 0:
            left[0] -= 1
            reject(errno.EIO)
        attach(driver, address)

    def scanned(address: str) -> None:
        left[0] = max(0, left[0] - 4)
        plug(address)

    monkeypatch.setattr(kernel.drivers, "_attach", refuse)
    monkeypatch.setattr(kernel, "plug", scanned)
    removed = f"/sys/bus/pci/devices/{FIRST}/remove"
    if refusals == 1:
        unbind(live)
    elif refusals == 2:
        with pytest.warns(UserWarning, match="amdgpu refused 0000:01:00.0 before it was removed"):
            unbind(live)
    else:
        with pytest.raises(RolledBack, match="amdgpu"):
            unbind(live)
        assert driver(live) == "vfio-pci"
        left[0] = 0
        unbind(live)
    assert any(one.path == removed for one in kernel.operations) is (refusals > 1)
    assert not any("01:00.1/remove" in one.path for one in kernel.operations)
    assert driver(live) == "amdgpu"
    assert live.has_screen()
    assert live.is_active("gdm.service")


def test_a_rollback_does_not_hide_that_a_session_has_ended(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    live.immortal.add(1300)
    with pytest.raises(RolledBack) as caught:
        bind(live)
    assert caught.value.message.endswith("before, except: ended session 2 of anna")
    assert live.log == ["stop gdm.service", "end session 2", "start gdm.service"]
