"""What all tests share: a count of each kind at the end of a run."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING

from tests.lab.topology import CURRENT_VARIABLE

if TYPE_CHECKING:
    import pytest

KINDS = {"unit": "unit", "integration": "integration", "lab": "laboratory"}
PROGRAM = "program"
"""The property of a test that names a program as it was really run."""
OUTCOMES = ("passed", "failed", "error", "skipped")


_MEMORY = "/dev/shm"  # noqa: S108 - pytest makes a directory of its own there


def pytest_configure() -> None:
    """Make the hosts of tests in memory, where the machine has such a place: they are small.

    A guest of the laboratory has its own /tmp there. No example of a property is timed: how long
    one takes says what else the machine does.
    """
    if CURRENT_VARIABLE in os.environ:
        return
    from hypothesis import settings  # noqa: PLC0415 - slow to import in a guest

    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")
    if os.access(_MEMORY, os.W_OK):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each program of another release, and one for each kind of test."""
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, []):
            kind = report.nodeid.removeprefix("tests/").partition("/")[0]
            if kind in counts:
                counts[kind][outcome] += 1
    programs = Counter(
        str(value)
        for report in terminalreporter.stats.get("passed", [])
        for name, value in report.user_properties
        if name == PROGRAM
    )
    if programs:
        terminalreporter.section("programs that tests were run with")
    for program, passed in sorted(programs.items()):
        terminalreporter.write_line(f"{program}: {passed} passed")
    terminalreporter.section("tests by kind")
    for kind, count in counts.items():
        shown = ", ".join(f"{count[outcome]} {outcome}" for outcome in OUTCOMES)
        terminalreporter.write_line(f"{KINDS[kind]}: {shown}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` writes golden files anew instead of comparing with them."""
    parser.addoption("--update-golden", action="store_true", help="write golden files anew")
