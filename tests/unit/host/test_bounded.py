from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vfiomgr.host import bounded
from vfiomgr.host.tree import HostTree

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import pytest


class Machine(HostTree):
    """A tree whose questions are asked by a child, as those of a real kernel."""

    can_hang = True


def busy(seconds: float) -> Iterable[str]:
    """An answer that takes a processor for some time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return ("told",)


def test_a_child_that_is_slow_on_a_busy_machine_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "DEADLINE", 0.05)
    questions = {"first": lambda: busy(0.8), "second": lambda: ("told",)}
    assert bounded.ask(Machine(tmp_path), questions) == {"first": ("told",), "second": ("told",)}


def test_but_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "DEADLINE", 0.05)
    monkeypatch.setattr(bounded, "PATIENCE", 0.5)
    assert bounded.ask(Machine(tmp_path), {"first": lambda: busy(30)}) == {}


def test_a_child_that_waits_for_the_kernel_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "DEADLINE", 0.05)

    def waiting() -> Iterable[str]:
        time.sleep(120)
        return ("told",)

    questions = {"first": lambda: ("told",), "second": waiting, "third": lambda: ("told",)}
    assert bounded.ask(Machine(tmp_path), questions) == {"first": ("told",)}
