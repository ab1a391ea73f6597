"""pytest plugin of the guest: runs the tests that the machine chose, and streams their reports.

The machine and the guest exchange two files in the results directory:
    selected.json    node ids to run, in their order
    reports.jsonl    one line per report as pytest serialises it, and one per finished test
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pytest

from tests.lab.machine import RESULTS_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Iterator

SELECTED = "selected.json"
REPORTS = "reports.jsonl"


def pytest_configure(config: pytest.Config) -> None:
    """Register the reporter."""
    config.pluginmanager.register(Reporter(config, Path(os.environ[RESULTS_VARIABLE])))


class Reporter:
    """Writes every report of this session as a line of JSON."""

    def __init__(self, config: pytest.Config, results: Path) -> None:
        self._config = config
        self._results = results
        self._stream: TextIO = (results / REPORTS).open("w")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the selected tests only."""
        selected: list[str] = json.loads((self._results / SELECTED).read_text())
        known = {item.nodeid: item for item in items}
        items[:] = [known[nodeid] for nodeid in selected if nodeid in known]

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


def read_lines(stream: TextIO) -> Iterator[dict[str, object]]:
    """Yield the complete lines that a reporter has written since the last call."""
    while True:
        start = stream.tell()
        line = stream.readline()
        if not line.endswith("\n"):
            stream.seek(start)
            return
        yield json.loads(line)
