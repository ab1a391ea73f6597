"""Units and sessions of a desktop that do not behave: `bind --release` and its return."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.fakes import desktop as desktops
from tests.fakes.live_desktop import LiveDesktop
from tests.unit.passthrough.test_release import SECOND, SECOND_TOO, bind, driver, unbind
from vfiomgr.errors import RolledBack

if TYPE_CHECKING:
    from pathlib import Path


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


def test_a_rollback_does_not_hide_that_a_session_has_ended(tmp_path: Path) -> None:
    live = LiveDesktop(desktops.gnome(tmp_path))
    live.immortal.add(1300)
    with pytest.raises(RolledBack) as caught:
        bind(live)
    assert caught.value.message.endswith("before, except: ended session 2 of anna")
    assert live.log == ["stop gdm.service", "end session 2", "start gdm.service"]
