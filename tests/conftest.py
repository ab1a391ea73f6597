"""What all tests share: a count of each kind and the dearest tests at the end of a run."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter, defaultdict
from itertools import chain
from typing import TYPE_CHECKING

import pytest

from tests import totals
from tests.costs import Stopwatch, by_test, dearest
from tests.lab.outcomes import OUTCOMES
from tests.lab.platforms import PLATFORMS
from tests.lab.topology import CURRENT_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Generator

KINDS = {"unit": "unit", "field": "field", "integration": "integration", "lab": "laboratory"}
PROGRAM = "program"
"""The property of a test that names a program as it was really run."""
_TOTALS = os.environ.pop(totals.VARIABLE, None)
"""The file with the outcomes of several runs; not for runs that tests start."""
_STOPWATCH = Stopwatch()
_MOST_YOUNG = 10_000
"""Objects between two passes of the garbage collector: thousands of tests are collected once, and
going through them again and again took a tenth of a run."""
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
"""Tests that use gRPC leave threads, whose fork handlers can block the children of later tests
(https://github.com/grpc/grpc/issues/22624); read when gRPC is imported, also in a guest."""
_MEMORY = "/dev/shm"  # noqa: S108 - pytest makes a directory of its own there


def pytest_configure() -> None:
    """Make the hosts of tests in memory, where the machine has such a place: they are small.

    A guest of the laboratory has its own /tmp there. No example of a property is timed: how long
    one takes says what else the machine does. A shell that starts the run in the background has it
    ignore SIGINT, which tests send to themselves.
    """
    gc.set_threshold(_MOST_YOUNG)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if CURRENT_VARIABLE in os.environ:
        return
    from hypothesis import settings  # noqa: PLC0415 - slow to import in a guest

    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")
    if os.access(_MEMORY, os.W_OK):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY)


def pytest_collection_finish() -> None:
    """Leave the tests themselves to the end of the process: no collection looks at them."""
    gc.freeze()


def pytest_runtest_logstart() -> None:
    """Count from here what a test costs."""
    _STOPWATCH.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say what each phase of a test cost."""
    report = yield
    _STOPWATCH.stamp(report)
    return report


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note that a run begins, for the summary of several; not the processes of one."""
    if _TOTALS is not None and not hasattr(session.config, "workerinput"):
        totals.begin(_TOTALS)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a test was skipped and all were required to run."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") == "true" and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What was run, and what it cost: programs of other releases, the dearest tests, the kinds."""
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, []):
            if (kind := _kind(report.nodeid)) in outcomes:
                outcomes[kind][outcome] += 1
    _write_programs(terminalreporter)
    reports = chain.from_iterable(terminalreporter.stats.values())
    costs = by_test(report for report in reports if isinstance(report, pytest.TestReport))
    spent: defaultdict[str, float] = defaultdict(float)
    for nodeid, cost in costs.items():
        spent[_kind(nodeid)] += cost
    terminalreporter.section("dearest tests, by processor time")
    terminalreporter.write_line("\n".join(dearest(costs)))
    total = totals.Totals(outcomes, spent, 0)
    if _TOTALS is not None:
        total = totals.end(_TOTALS, outcomes, spent)
    terminalreporter.section("tests by kind")
    for kind, count in total.outcomes.items():
        shown = ", ".join(f"{count[outcome]} {outcome}" for outcome in OUTCOMES)
        terminalreporter.write_line(f"{KINDS[kind]}: {shown}; {total.spent.get(kind, 0):.0f} s")
    if total.unfinished:
        crashed = f"{total.unfinished} earlier run(s) ended without a result"
        terminalreporter.write_line(f"not counted: {crashed}")


def _write_programs(terminalreporter: pytest.TerminalReporter) -> None:
    """Write a line for each program of another release."""
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


def _kind(nodeid: str) -> str:
    """Return the directory of a test."""
    return nodeid.removeprefix("tests/").partition("/")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` writes golden files anew; `--platform` is what laboratory tests boot."""
    parser.addoption("--update-golden", action="store_true", help="write golden files anew")
    parser.addoption(
        "--platform",
        action="append",
        choices=sorted(PLATFORMS),
        help="run all laboratory tests on this platform; more than once for several",
    )
