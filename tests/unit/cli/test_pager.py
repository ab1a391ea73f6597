"""Output that is longer than the screen goes through a pager, as git's does."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.terminals import shown_on_terminal
from vfiomgr.cli.output import page

if TYPE_CHECKING:
    from tests.fakes.kernel import FakeKernel

MARK = "sed s/^/P:/"


def shown(kernel: FakeKernel, *arguments: str, **settings: object) -> str:
    command = [sys.executable, "-m", "vfiomgr", "--root", kernel.root, *arguments]
    status, text = shown_on_terminal(command, **{"columns": 120, "lines": 10, **settings})  # type: ignore[arg-type]
    assert status == 0
    return text


@pytest.mark.parametrize(
    ("variables", "is_paged"),
    [
        ({"PAGER": MARK}, True),
        ({"VFIOMGR_PAGER": MARK, "PAGER": "cat"}, True),
        ({"VFIOMGR_PAGER": "cat", "PAGER": MARK}, False),
        ({"VFIOMGR_PAGER": "", "PAGER": MARK}, False),
        ({"PAGER": ""}, False),
        ({"PAGER": MARK, "TERM": "dumb"}, False),
    ],
)
def test_the_pager_of_the_user_is_honoured(
    kernel: FakeKernel, variables: dict[str, str], *, is_paged: bool
) -> None:
    lines = shown(kernel, "list", "--all", variables=variables).splitlines()
    assert sum(line.startswith("P:") for line in lines) == (21 if is_paged else 0)
    assert sum("0000:05:00.0" in line for line in lines) == 1


def test_what_fits_on_the_screen_is_not_paged(kernel: FakeKernel) -> None:
    assert "P:" not in shown(kernel, "list", "--all", variables={"PAGER": MARK}, lines=40)
    assert "P:" not in shown(kernel, "list", variables={"PAGER": MARK})


@pytest.mark.parametrize("arguments", [("list", "--all", "--format", "json"), ("snapshot",)])
def test_a_document_is_not_paged(kernel: FakeKernel, arguments: tuple[str, ...]) -> None:
    assert "P:" not in shown(kernel, *arguments, variables={"PAGER": MARK})


def test_without_a_keyboard_there_is_no_pager(kernel: FakeKernel) -> None:
    text = shown(kernel, "list", "--all", variables={"PAGER": MARK}, has_keyboard=False)
    assert "P:" not in text


@pytest.mark.parametrize(
    ("variables", "told"), [({}, "LESS=FRX"), ({"LESS": "R"}, "LESS=R"), ({"LESS": ""}, "LESS=")]
)
def test_less_ends_by_itself_and_shows_colours(
    kernel: FakeKernel, variables: dict[str, str], told: str
) -> None:
    pager = {"PAGER": "cat > /dev/null; echo LESS=$LESS"}
    assert shown(kernel, "list", "--all", variables=pager | variables).splitlines() == [told]


def test_a_pager_that_cannot_be_run_hides_nothing(kernel: FakeKernel) -> None:
    text = shown(kernel, "list", "--all", variables={"PAGER": "no-such-pager"})
    assert "no-such-pager" in text
    assert text.count("0000:05:00.0") == 1


def test_a_pager_that_is_left_early_is_no_error(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert shown(kernel, "list", "--all", variables={"PAGER": "head -n 1"}).count("\n") == 1
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("VFIOMGR_PAGER", "head -n 1")
    assert page("one\n" + "x" * (1 << 20))
    assert capfd.readouterr() == ("one\n", "")
