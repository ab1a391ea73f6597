"""Tests with other releases: which command runs them where."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests import releases
from tests.lab.errors import BuildError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands, of which none is run; the root of each release is a directory."""
    commands: list[list[str]] = []

    def call(command: list[str]) -> int:
        commands.append(command)
        return int("tests/integration" in command)

    monkeypatch.setattr(releases, "_call", call)
    monkeypatch.setattr(releases, "root_directory", lambda release, *_: tmp_path / release)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return commands


def test_a_release_runs_both_kinds_in_its_root(called: list[list[str]], tmp_path: Path) -> None:
    assert releases.main(["trixie"]) == 1
    assert {tuple(command[:3]) for command in called} == {("unshare", "--mount", "sh")}
    assert all(str(tmp_path / "trixie") in command for command in called)
    assert [command[-1] for command in called[-2:]] == ["tests/unit", "libvirt"]


def test_a_python_runs_unit_tests_in_an_environment_of_its_own(called: list[list[str]]) -> None:
    assert releases.main(["/opt/python3.15"]) == 0
    (*_, last) = called
    assert last[0].endswith("/pythons/python3.15/bin/python")
    assert last[-1] == "tests/unit"


def test_only_root_has_roots(called: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(BuildError, match="only root"):
        releases.main(["sid", "--unit"])
    assert not called
