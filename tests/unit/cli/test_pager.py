"""Output that is longer than the screen goes through a pager, as git's does."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.terminals import shown_on_terminal
from vfiomgr.cli import pager

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.fakes.kernel import FakeKernel

MARK = "sed s/^/P:/"
START = (
    "from vfiomgr.cli import pager; pager.LOGIN_USER = '/none'\n"
    "from vfiomgr.__main__ import start; start()"
)
"""Runs vfiomgr as if nobody had logged in: tests may run after `sudo`."""


def shown(kernel: FakeKernel, *arguments: str, **settings: object) -> str:
    command = [sys.executable, "-c", START, "--root", kernel.root, *arguments]
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
    for name in pager.GAINED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pager, "LOGIN_USER", "/none")
    assert pager.page("one\n" + "x" * (1 << 20))
    assert capfd.readouterr() == ("one\n", "")


@pytest.mark.parametrize(
    "gained",
    [
        *({name: "1000"} for name in ("SUDO_UID", "SUDO_GID", "PKEXEC_UID")),
        *({name: "alice"} for name in ("SUDO_USER", "DOAS_USER")),
    ],
)
@pytest.mark.parametrize("name", ["PAGER", "VFIOMGR_PAGER"])
def test_rights_gained_by_sudo_do_not_reach_a_pager_of_the_user(
    kernel: FakeKernel, gained: dict[str, str], name: str
) -> None:
    text = shown(kernel, "list", "--all", variables={name: MARK, **gained})
    assert "P:" not in text
    assert text.count("0000:05:00.0") == 1


@pytest.fixture
def started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> list[tuple[list[str], dict[str, str]]]:
    """The programs that `page` starts, with their variables; `less` is in `tmp_path`."""
    found: list[tuple[list[str], dict[str, str]]] = []

    class Started:
        def __init__(self, command: list[str], *, stdin: int, env: dict[str, str]) -> None:  # noqa: ARG002 - as Popen
            found.append((command, env))

        def communicate(self, _text: bytes) -> None:
            pass

        def wait(self) -> int:
            return 0

    (tmp_path / "less").write_text("#!/bin/sh\n")
    (tmp_path / "less").chmod(0o755)
    monkeypatch.setattr(pager, "PROGRAM_PATH", str(tmp_path))
    monkeypatch.setattr(pager, "LOGIN_USER", str(tmp_path / "loginuid"))
    monkeypatch.setattr(subprocess, "Popen", Started)
    for name in (*pager.GAINED, "VFIOMGR_PAGER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("PAGER", "less -R")
    return found


def gain_by_sudo(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    assert directory
    monkeypatch.setenv("SUDO_UID", "1000")


def gain_by_set_user(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    assert directory
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)


def gain_by_set_group(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    assert directory
    monkeypatch.setattr(os, "getgid", lambda: os.getegid() + 1)


def gain_after_login(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    assert monkeypatch
    (directory / "loginuid").write_text(str(os.geteuid() + 1))


def gain_without_record(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    assert monkeypatch
    (directory / "loginuid").mkdir()


@pytest.mark.parametrize(
    "gain",
    [gain_by_sudo, gain_by_set_user, gain_by_set_group, gain_after_login, gain_without_record],
)
def test_with_gained_rights_less_is_secure_and_gets_no_variable_that_names_a_program(
    started: list[tuple[list[str], dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    gain: Callable[[pytest.MonkeyPatch, Path], None],
) -> None:
    for name in ("LESSOPEN", "LESSCLOSE", "LESSKEYIN", "LESSEDIT", "LESSSECURE_ALLOW", "HOME"):
        monkeypatch.setenv(name, "|sh")
    monkeypatch.setenv("LESS", "-oFILE")
    gain(monkeypatch, tmp_path)
    assert pager.page("text")
    [(command, variables)] = started
    assert command == [str(tmp_path / "less")]
    assert variables["LESSSECURE"] == "1"
    assert variables["LESS"] == "FRX"
    assert {name for name in variables if name not in ("LANG", "LC_ALL", "LC_CTYPE")} == {
        "TERM",
        "PATH",
        "LESS",
        "LESSSECURE",
        "LESSHISTFILE",
    }


@pytest.mark.parametrize("wanted", ["more", "less;sh", "vim -", "/bin/less2", "cat", ""])
def test_with_gained_rights_no_other_pager_is_started(
    started: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    monkeypatch.setenv("SUDO_UID", "1000")
    monkeypatch.setenv("PAGER", wanted)
    assert not pager.page("text")
    assert started == []


def test_less_of_busybox_is_not_started_with_gained_rights(
    started: list[tuple[list[str], dict[str, str]]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "less").rename(tmp_path / "busybox")
    (tmp_path / "less").symlink_to("busybox")
    monkeypatch.setenv("SUDO_UID", "1000")
    assert not pager.page("text")
    assert started == []


@pytest.mark.parametrize("number", ["4294967295", None])
def test_a_service_without_login_has_gained_nothing(
    started: list[tuple[list[str], dict[str, str]]], tmp_path: Path, number: str | None
) -> None:
    if number is not None:
        (tmp_path / "loginuid").write_text(number)
    assert pager.page("text")
    assert started[0][0] == ["/bin/sh", "-c", "less -R"]
