"""Every table of the program on a real terminal: headings and fixed cells are complete."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

import vfiomgr
from tests.terminals import Terminal
from tests.unit.golden import test_goldens
from tests.unit.golden.hosts import MBOCHS, UUID, arc_host, small_a40_host
from tests.unit.golden.transcripts import Scenario
from vfiomgr.cli import output
from vfiomgr.cli.table import _LEAST, lines_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.unit.conftest import Run
    from tests.unit.golden.transcripts import Place
    from vfiomgr.cli.table import Column, Lines

scenario, kernel, place = test_goldens.scenario, test_goldens.kernel, test_goldens.place
_steady, play, SCENARIOS = test_goldens._steady, test_goldens.play, test_goldens.SCENARIOS
SOURCE = Path(vfiomgr.__file__).parent
WIDTHS = (80, 100, 120, 200)
CALLERS = {
    "cdi list": "containers.cdi.commands.list_devices",
    "check cdi": "containers.cdi.commands._print_check",
    "explain": "main.commands.explain._print_entries",
    "fleet check": "fleet.commands.reading.check",
    "fleet diff": "fleet.commands.reading.diff",
    "fleet drain": "fleet.commands.placing._print_moves",
    "fleet list": "fleet.commands.reading.list_hosts",
    "fleet place": "fleet.commands.placing._print",
    "groups": "cli.listing.print",
    "laptop": "laptop.commands._show",
    "libvirt list": "libvirt.commands.attach.list_claims",
    "list": "cli.listing.print",
    "list-persistent": "passthrough.persist_commands.print_persisted",
    "node simulate": "node.commands.simulate._print",
    "node status": "node.commands.status.status",
    "rom check": "main.commands.rom._print",
    "rom dump": "main.commands.rom._print",
    "sriov list": "sriov.commands.list_physical_functions",
    "sriov-set-existing": "sriov.commands._show",
    "vgpu instances": "gpu.commands._list",
    "vgpu list": "vgpu.commands.active.list_active",
    "vgpu-list-libvirt": "libvirt.commands.nodedev.list_mdevs",
    "vgpu list --defined": "definitions.listing.list_defined",
    "vgpu mode": "gpu.commands._show",
    "vgpu-list-types": "vgpu.commands.types.list_types",
    "vgpu-list-types-a40": "vgpu.commands.types.list_types",
}
"""The commands (or single scenarios) that print tables, and the function in which each does."""
WITHOUT = (
    "vgpu-instances-none",
    "vgpu-instances-set",
    "check-cdi-none",
    "explain",
    "groups",
    "node-status-no-agent",
    "explain-message",
    "vgpu-list-libvirt-none",
    "vgpu-mode-mig",
    "vgpu-mode-switch",
)
"""Scenarios of them without a table."""
DEFINED = f".vgpu define {MBOCHS}\n.vgpu start {UUID}"


def caller(known: Scenario) -> str | None:
    """The function that prints the tables of a scenario; None if it has none."""
    return CALLERS.get(str(known)) or CALLERS.get(known.command)


CASES = (
    *(known for known in SCENARIOS if caller(known) and str(known) not in WITHOUT),
    Scenario("explain", "explain", case="all"),
    Scenario("sriov list", ".sriov set 21:00.0 2\nsriov list", arc_host, case="quotas"),
    Scenario("vgpu list --defined", f"{DEFINED}\nvgpu list --defined"),
    Scenario("groups", f".vgpu create {MBOCHS}\ngroups", case="vgpus"),
    Scenario("list", "list --all --vfs\nlist --columns id,class,name", small_a40_host, case="vfs"),
)


class Table(NamedTuple):
    """What a command gave to `print_table`."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]


def callers() -> set[str]:
    """The functions in the program that print a table."""
    return {
        f"{'.'.join(file.relative_to(SOURCE).with_suffix('').parts)}.{function.name}"
        for file in SOURCE.rglob("*.py")
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print_table"
    }


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Table]]:
    """The tables that are printed, by the function that does."""
    found: dict[str, list[Table]] = {}

    def noting(columns: Sequence[Column], rows: Sequence[Sequence[str]], **rest: Any) -> Lines:
        caller = sys._getframe(2)
        name = f"{caller.f_globals['__name__']}.{caller.f_code.co_name}"
        found.setdefault(name.removeprefix("vfiomgr."), []).append(Table(columns, rows))
        return lines_of(columns, rows, **rest)

    monkeypatch.setattr(output, "lines_of", noting)
    return found


@pytest.mark.parametrize("scenario", CASES, ids=str, indirect=True)
def test_headings_and_fixed_cells_are_complete(
    run: Run, place: Place, tables: dict[str, list[Table]], scenario: Scenario
) -> None:
    play(scenario, run, place)
    for table in tuple(tables[str(caller(scenario))]):
        for width in WIDTHS:
            require_complete(table, shown(table, width, place.patch), width)


def test_no_table_is_left_out() -> None:
    assert callers() == set(CALLERS.values())


def shown(table: Table, width: int, patch: pytest.MonkeyPatch) -> list[str]:
    """A table as `print_table` writes it to a terminal."""
    with (
        patch.context() as own,
        Terminal(width) as screen,
        os.fdopen(os.dup(screen.device), "w") as stdout,
    ):
        own.delenv("COLUMNS", raising=False)
        own.setattr(sys, "stdout", stdout)
        own.setattr(sys, "__stdout__", stdout)
        output.print_table(table.columns, table.rows)
    return screen.text.splitlines()


def require_complete(table: Table, lines: list[str], width: int) -> None:
    """All headings, each fixed cell below its heading, and no line longer than it must be."""
    wanted = [column.heading for column in table.columns]
    heads = [_words(lines[0])]
    if heads[0] != wanted:
        heads.append(_words(lines[1]))
    assert [word for head in heads for word in head] == wanted
    starts = list(_starts(lines, heads))
    blocks: list[list[str]] = []
    for line in lines[len(heads) :]:
        if not line.startswith(" "):
            blocks.append([])
        blocks[-1].append(line)
    assert len(blocks) == len(table.rows)
    for block, row in zip(blocks, table.rows, strict=True):
        for start, column, cell in zip(starts, table.columns, row, strict=True):
            found = [line[start:].split("  ")[0].rstrip() for line in block]
            is_left_out = start in starts[len(heads[0]) :] and cell in ("", "-")
            assert column.manner != "whole" or is_left_out or cell in found, (column, cell, block)
    place = 0
    for head in heads:
        columns = table.columns[place : place + len(head)]
        least = starts[place] + 2 * (len(head) - 1)
        for number, column in enumerate(columns, place):
            cells = (column.heading, *(row[number] for row in table.rows))
            is_fixed = column.manner == "whole"
            least += max(map(len, cells)) if is_fixed else max(len(column.heading), _LEAST)
        place += len(head)
        assert least > width or max(map(len, lines)) <= width


def _words(line: str) -> list[str]:
    """The headings in a line."""
    return list(filter(None, map(str.strip, line.split("  "))))


def _starts(lines: list[str], heads: list[list[str]]) -> Iterator[int]:
    """Where each heading begins in its line."""
    for line, head in zip(lines, heads, strict=False):
        at = 0
        for word in head:
            at = line.index(word, at)
            yield at
            at += len(word)
