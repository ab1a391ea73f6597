"""What runs until it is interrupted collects garbage as Python does, other commands seldom."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.unit.layout.test_apply_commands import RULES, write
from vfiomgr.cli import garbage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.conftest import Run

_USUAL = (700, 10, 11)
"""What Python begins with, as one can tell from the thresholds of the tests."""


@pytest.fixture
def thresholds(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int, int]]]:
    """The thresholds with which the work of a command begins; it does none."""
    seen: list[tuple[int, int, int]] = []
    for place in (
        "vfiomgr.node.agent.run",
        "vfiomgr.node.scanner.serve",
        "vfiomgr.node.dra.vgpus.serve",
        "vfiomgr.layout.commands.watch.watch_layout",
        "vfiomgr.passthrough.watch.watch_machine",
    ):
        monkeypatch.setattr(place, lambda *_, **__: seen.append(gc.get_threshold()))
    monkeypatch.setattr("vfiomgr.layout.commands.watch.DeviceChanges", lambda _tree: None)
    monkeypatch.setattr(garbage, "_USUAL", _USUAL)
    before = gc.get_threshold()
    garbage.collect_seldom()
    yield seen
    gc.set_threshold(*before)


@pytest.mark.parametrize(
    "command",
    ["node run", "node scan", "node create", "layout watch layout.yaml", "persist watch"],
)
def test_what_runs_long_collects_as_usual(
    command: str,
    run: Run,
    thresholds: list[tuple[int, int, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "layout.yaml", lab=RULES[:1])
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        monkeypatch.setattr(sys.stdout, "fileno", nothing.fileno, raising=False)
        answer = run(*command.split())
    assert thresholds == [_USUAL], answer.stderr


def test_others_do_so_seldom() -> None:
    code = (
        "import gc; from vfiomgr.main import program; from vfiomgr.__main__ import start\n"
        "program.main = lambda: print(gc.get_threshold()[0])\nstart()"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "1000000\n"
