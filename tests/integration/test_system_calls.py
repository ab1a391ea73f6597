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


_TABLE = ("list", "--all")
_EVERYTHING = (*_TABLE, "--format", "json")
_FUNCTIONS = ("/sys/bus/pci/devices/", "/sys/devices/pci", "close_range(")
"""In the calls that read functions, but not their IOMMU groups."""


@pytest.mark.parametrize(
    ("command", "about", "most"),
    [
        pytest.param(_TABLE, ("",), 13, id="list"),
        pytest.param(_EVERYTHING, _FUNCTIONS, 32, id="a function"),
        pytest.param(_EVERYTHING, ("",), 44, id="a function and its group"),
        pytest.param(("metrics",), ("",), 48, id="metrics"),
    ],
)
def test_a_function_more_costs_few_system_calls(
    tmp_path: Path, command: tuple[str, ...], about: tuple[str, ...], most: int
) -> None:
    """In a tree like this, two files of `power` are looked at before they are opened."""
    few, many = (counted(tmp_path, blocks, command, about) for blocks in (_FEW, _MANY))
    assert 0 < many - few <= most * BLOCK * (_MANY - _FEW)


def counted(place: Path, blocks: int, command: tuple[str, ...], about: tuple[str, ...]) -> int:
    """The system calls of a command that are about something, on a host of so many blocks."""
    root, calls = place / str(blocks), place / f"{blocks}.calls"
    make_tree(str(root), blocks * BLOCK)
    strace = shutil.which("strace")
    assert strace, "strace is missing: tools/packages-dev.txt names it"
    subprocess.run(
        (strace, "-f", "-qq", "-y", "-o", calls, VFIOMGR, "--root", root, *command),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    lines = calls.read_text().splitlines()
    return sum(any(place in line for place in about) for line in lines)
