"""How many system calls a function costs, counted by strace, however long they take."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from benchmarks.trees import BLOCK, make_tree
from tests.lab.command import VFIOMGR

if TYPE_CHECKING:
    from pathlib import Path

_FEW, _MANY = 2, 6
"""Blocks of functions: what a process does once is in both counts."""


@pytest.mark.parametrize(
    ("most", "command"), [(14, ("list", "--all")), (57, ("list", "--all", "--format", "json"))]
)
def test_a_function_more_costs_few_system_calls(
    tmp_path: Path, most: int, command: tuple[str, ...]
) -> None:
    few, many = (counted(tmp_path, blocks, command) for blocks in (_FEW, _MANY))
    assert many - few <= most * BLOCK * (_MANY - _FEW)


def counted(place: Path, blocks: int, command: tuple[str, ...]) -> int:
    """The system calls of a command on a host of so many blocks."""
    root, calls = place / str(blocks), place / f"{blocks}.calls"
    make_tree(str(root), blocks * BLOCK)
    strace = shutil.which("strace")
    assert strace, "strace is missing: tools/packages-dev.txt names it"
    subprocess.run(
        (strace, "-f", "-qq", "-o", calls, VFIOMGR, "--root", root, *command),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return len(calls.read_text().splitlines())
