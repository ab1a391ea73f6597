"""How a long change is followed, on a terminal and without."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vfiomgr.cli.progress import followed
from vfiomgr.cli.session import Session
from vfiomgr.executor.change import Work
from vfiomgr.model.plan import Plan
from vfiomgr.model.step import LoadModule

if TYPE_CHECKING:
    import pytest

STEPS = tuple(LoadModule(f"module[{number}]", "driver") for number in range(3))
LINES = [f"  load the kernel module module[{number}]" for number in range(3)]


def follow() -> None:
    session = Session()
    with followed(session) as options:
        work = Work(session.tree, **options)
        work.on_plan(Plan("first", STEPS[:2]))
        work.on_note("waiting for PID 4711")
        for step in STEPS[:2]:
            work.on_step(step)
        work.on_plan(Plan("then", STEPS[2:]))
        work.on_step(STEPS[2])


def test_lines_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    follow()
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == ["waiting for PID 4711", *LINES]


def test_a_bar_on_a_terminal_and_the_lines_above_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    follow()
    told = capsys.readouterr()
    assert told.out == ""
    for line in ("waiting for PID 4711", *LINES):
        assert line in told.err
    assert "2/3" in told.err, "two steps are done while the third one is under way"
