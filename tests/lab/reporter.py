"""pytest plugin of the guest: asks the machine for tests, module by module, and streams reports.

The machine and the guest exchange these files in the results directory:
    reports.jsonl    one line per report as pytest serialises it, one per finished test, one
                     for each module that the guest wants, and what ran long at its end
    module.N         what the machine answers: node ids to run, in their order; none at the end
"""

from __future__ import annotations

import gc
import json
import os
import time
from itertools import chain, count, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tests.lab.machine import RESULTS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

REPORTS = "reports.jsonl"
MODULE = "module"
_POLL = 0.05
_LONG = 10
"""Seconds of processor time, in the guest."""
_TIMES = slice(11, 13)
"""utime and stime after the name of the program (proc(5), /proc/PID/stat)."""


def pytest_configure(config: pytest.Config) -> None:
    """Register the reporter."""
    config.pluginmanager.register(Reporter(config, Path(os.environ[RESULTS_VARIABLE])))


class Reporter:
    """Writes every report of this session as a line of JSON."""

    def __init__(self, config: pytest.Config, results: Path) -> None:
        self._config = config
        self._results = results
        self._stream: TextIO = (results / REPORTS).open("w")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run what the machine chooses, as pytest would run all."""
        known = {item.nodeid: item for item in session.items}
        gc.freeze()  # a collection in a forked child would copy every page of this process
        # The next test is known before one is run: it says which fixtures stay.
        for item, following in pairwise(chain(self._chosen(known), [None])):
            assert item is not None
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        self._write({"busy": busy_processes()})
        return True

    def _chosen(self, known: dict[str, pytest.Item]) -> Iterator[pytest.Item]:
        """Yield the tests of one module after the other, while there are any."""
        for number in count():
            self._write({"wants": number})
            answer = self._results / f"{MODULE}.{number}"
            while not answer.exists():
                time.sleep(_POLL)
            if not (chosen := json.loads(answer.read_text())):
                return
            yield from (known[nodeid] for nodeid in chosen if nodeid in known)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Tell the machine why a module could not be collected here."""
        if report.failed:
            self._write({"collect": str(report.longrepr)})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send one phase of a test."""
        hook = self._config.hook
        data = hook.pytest_report_to_serializable(config=self._config, report=report)
        self._write({"nodeid": report.nodeid, "report": data})

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """Say that a test has no further phase."""
        self._write({"nodeid": nodeid, "finished": True})

    def pytest_unconfigure(self) -> None:
        """Close the stream."""
        self._stream.close()

    def _write(self, line: dict[str, object]) -> None:
        """Write one line at once: the guest may die with the next test."""
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()


def busy_processes() -> list[str]:
    """Tell the other processes that have taken long, with their processor time, the longest first.

    What tests leave behind makes later ones slow.
    """
    found: list[tuple[float, str]] = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            fields = (directory / "stat").read_text().rpartition(")")[2].split()
            words = (directory / "cmdline").read_text().split("\0")
        except OSError:
            continue  # it has ended
        spent = sum(map(int, fields[_TIMES])) / os.sysconf("SC_CLK_TCK")
        if spent >= _LONG and int(directory.name) != os.getpid():
            found.append((spent, " ".join(words).strip() or f"kernel thread {directory.name}"))
    return [f"{spent:.0f} s: {command:.100}" for spent, command in sorted(found, reverse=True)]


def read_lines(stream: TextIO) -> Iterator[dict[str, object]]:
    """Yield the complete lines that a reporter has written since the last call."""
    while True:
        start = stream.tell()
        line = stream.readline()
        if not line.endswith("\n"):
            stream.seek(start)
            return
        yield json.loads(line)
