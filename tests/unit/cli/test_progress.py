"""How a long change is followed, on a terminal and without."""

from __future__ import annotations

import re
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from vfiomgr.engine.changes import followed, shown_wait
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.transaction import ApplyContext
from vfiomgr.persistence.steps import LoadModule
from vfiomgr.snapshot.session import Session

if TYPE_CHECKING:
    import pytest

    from tests.unit.conftest import Run

WIDTH = 120
_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_CLOCK = re.compile(r"\d:\d\d:\d\d")
STEPS = tuple(LoadModule(f"module[{number}]", "driver") for number in range(3))
LINES = [f"  load the kernel module module[{number}]" for number in range(3)]


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what pytest captures pass for one."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


def follow() -> None:
    session = Session()
    with followed(session) as host:
        work = ApplyContext(session.tree, **host.options)
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
    use_terminal(monkeypatch)
    follow()
    told = capsys.readouterr()
    assert told.out == ""
    for line in ("waiting for PID 4711", *LINES):
        assert line in told.err
    assert "0/0" not in told.err
    assert "2/3" in told.err, "two steps are done while the third one is under way"


def test_before_there_is_a_plan_nothing_is_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_terminal(monkeypatch)
    with followed(Session()) as host:
        work = ApplyContext(Session().tree, **host.options)
        time.sleep(0.3)  # rich draws ten times a second
        work.on_plan(Plan("nothing", ()))
    told = capsys.readouterr().err
    assert "reading the host" in told
    assert "0/" not in told.replace("0:00:0", "")


def test_columns_keep_their_places(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few steps and with many, and with descriptions longer than the line."""
    use_terminal(monkeypatch)
    with followed(Session()) as host:
        work = ApplyContext(Session().tree, **host.options)
        time.sleep(0.2)
        for count in (9, 991):
            steps = tuple(LoadModule("m" * number, "d") for number in range(1, count + 1, 200))
            work.on_plan(Plan("more", steps * (count // len(steps) + 1)))
            for step in steps:
                work.on_step(step)
                time.sleep(0.11)
    told = _SEQUENCE.sub("", capsys.readouterr().err)
    drawn = [line for line in told.replace("\r", "\n").splitlines() if _CLOCK.search(line)]
    assert len({_CLOCK.search(line).start() for line in drawn if "━" in line}) == 1  # type: ignore[union-attr]
    assert all(len(line) <= WIDTH for line in drawn)


def test_a_spinner_says_what_is_done_until_steps_are_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_terminal(monkeypatch)
    with followed(Session()) as host:
        time.sleep(0.2)
        spinner = _SEQUENCE.sub("", capsys.readouterr().err)
        work = ApplyContext(Session().tree, **host.options)
        work.on_plan(Plan("first", STEPS))
        time.sleep(0.2)
        bar = _SEQUENCE.sub("", capsys.readouterr().err)
    assert re.search(r"\S reading the host", spinner)
    assert "━" not in spinner
    assert "━" * 30 in bar
    assert "0/3" in bar


def test_a_change_of_several_devices_has_a_bar_on_a_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_terminal(monkeypatch)
    answer = run("bind", "0000:01:00.0", "0000:02:00.0")
    assert answer.status == 0
    drawn = _SEQUENCE.sub("", answer.stderr)
    steps = [line for line in drawn.splitlines() if line.startswith("  ")]
    assert re.search(rf"━{{30}} +\d+/{len(steps)} ", drawn)
    assert "━" not in answer.stdout
    assert "reading the host" in drawn


def test_without_a_terminal_steps_are_lines_where_they_are_asked_for(run: Run) -> None:
    told = run("-v", "bind", "0000:01:00.0").stderr.splitlines()
    assert [line for line in told if line.startswith("  ")]
    assert not [line for line in told if "━" in line]
    quiet = run("bind", "0000:02:00.0").stderr.splitlines()
    assert not [line for line in quiet if line.startswith("  ")]


def wait_for_events() -> None:
    with shown_wait("waiting for [changes]") as wait:
        with wait.pause():
            sys.stdout.write("drift\n")
        wait.tell_step(STEPS[0])
        time.sleep(0.3)  # the spinner is drawn by a thread


def test_a_spinner_on_a_terminal_while_a_command_waits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_terminal(monkeypatch)
    wait_for_events()
    told = capsys.readouterr()
    assert told.out == "drift\n"
    shown = _SEQUENCE.sub("", told.err)
    assert "waiting for [changes]" in shown
    assert "load the kernel module module[0]" in shown


def test_a_spinner_returns_after_an_error_in_a_pause(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_terminal(monkeypatch)
    with shown_wait("waiting for changes") as wait:
        with suppress(BrokenPipeError), wait.pause():
            capsys.readouterr()
            raise BrokenPipeError
        time.sleep(0.3)
        assert "waiting for changes" in _SEQUENCE.sub("", capsys.readouterr().err)


def test_no_spinner_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    wait_for_events()
    assert capsys.readouterr() == ("drift\n", "")
