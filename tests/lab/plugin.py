"""pytest plugin of the machine: lab tests run in guests and report as if they had run here.

One guest boots per topology, at its first test, and runs all its selected tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pytest

from tests.lab import packages
from tests.lab.errors import GuestError, GuestTimeout, LabError, last_lines
from tests.lab.machine import Guest, Job
from tests.lab.reporter import REPORTS, SELECTED, read_lines
from tests.lab.topology import TOPOLOGIES, Topology

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIMIT_VARIABLE = "VFIOMGR_LAB_TIMEOUT"
_LIMIT = 600.0  # seconds without a word from the guest: one test may die thirty times
_POLL = 0.1


class LabRun:
    """The guests of one pytest session."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._missing = packages.missing()
        self._guests: dict[str, GuestRun] = {}
        self._failed: dict[str, LabError] = {}

    def reports(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        """Yield the reports of one test, as they come."""
        if self._missing:
            yield self._without_laboratory(item)
            return
        try:
            yield from self._guest(topology_of(item)).reports(item.nodeid)
        except LabError as error:
            yield _report(item, "failed", str(error))

    def close(self) -> None:
        """End all guests."""
        for guest in self._guests.values():
            guest.close()

    def _guest(self, topology: Topology) -> GuestRun:
        """Return the guest of a topology, booted at the first call, which fails once for all."""
        if topology.name in self._failed:
            raise self._failed[topology.name]
        if topology.name not in self._guests:
            items = [item for item in self._session.items if _is_of(item, topology)]
            try:
                self._guests[topology.name] = GuestRun(topology, self._session.config, items)
            except LabError as error:
                self._failed[topology.name] = error
                raise
        return self._guests[topology.name]

    def _without_laboratory(self, item: pytest.Item) -> pytest.TestReport:
        """Return a skip, or a failure where the laboratory is required."""
        command = packages.install_command(self._missing)
        reason = f"the laboratory lacks {', '.join(self._missing)}: {command}"
        return _report(item, "failed" if _required() else "skipped", reason)


class GuestRun:
    """pytest in one guest, for the tests of its topology."""

    def __init__(self, topology: Topology, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._config = config
        self._lines: deque[dict[str, object]] = deque()
        self._refused: list[str] = []
        self._failure: str | None = None
        self._told = False
        self._limit = float(os.environ.get(_LIMIT_VARIABLE, _LIMIT))
        self._stack = contextlib.ExitStack()
        self._guest = self._stack.enter_context(Guest(topology, _job(config, items)))
        self._stream: TextIO = self._stack.enter_context((self._guest.results / REPORTS).open())

    def reports(self, nodeid: str) -> Iterator[pytest.TestReport]:
        """Yield the reports of one test; GuestError or LabError where it has none."""
        while (line := self._next_line(nodeid)) is not None:
            if line.get("finished"):
                return
            yield self._revived(line["report"])
        raise LabError(self._why(nodeid))

    def _revived(self, data: object) -> pytest.TestReport:
        """Return a report that crossed from the guest as JSON."""
        hook = self._config.hook
        report = hook.pytest_report_from_serializable(config=self._config, data=data)
        assert isinstance(report, pytest.TestReport)
        # The place and reason of a skip: JSON has no tuples, and pytest insists on one.
        if isinstance(report.longrepr, list):
            path, line, reason = report.longrepr
            report.longrepr = (path, line, reason)
        return report

    def close(self) -> None:
        """End the guest."""
        self._stack.close()

    def _next_line(self, nodeid: str) -> dict[str, object] | None:
        """Return the next line about a test, waited for; None where none can come."""
        deadline = time.monotonic() + self._limit
        while True:
            ended = not self._guest.running
            if self._receive():
                deadline = time.monotonic() + self._limit
            for line in self._lines:
                if line["nodeid"] == nodeid:
                    self._lines.remove(line)
                    return line
            if ended:
                return None
            if time.monotonic() > deadline:
                self._give_up(f"nothing was heard from the guest for {self._limit:.0f} s")
            time.sleep(_POLL)

    def _receive(self) -> bool:
        """Take in what the guest wrote; return whether it was anything."""
        lines = list(read_lines(self._stream))
        self._refused += [str(line["collect"]) for line in lines if "collect" in line]
        self._lines += [line for line in lines if "nodeid" in line]
        return bool(lines)

    def _give_up(self, what: str) -> None:
        """End a guest that hangs."""
        self._guest.kill()
        self._failure = str(GuestTimeout(what, console=self._guest.console))

    def _why(self, nodeid: str) -> str:
        """Return why an ended guest has no report of a test; the logs for the first one only."""
        self._guest.keep = True
        cause, *logs = self._end().splitlines()
        first = f"{cause}: no report of {nodeid}"
        if self._told:
            return f"{first}\nlogs: {self._guest.directory}"
        self._told = True
        output = f"output: {self._guest.output}\n{last_lines(self._guest.output)}"
        return "\n".join([first, *logs, *self._refused, output])

    def _end(self) -> str:
        """Return how the guest ended."""
        if self._failure:
            return self._failure
        try:
            return f"pytest ended with {self._guest.status()} in the guest"
        except GuestError as error:
            return str(error)


def topology_of(item: pytest.Item) -> Topology:
    """Return the topology that a test's marker names; LabError where it names none."""
    marker = item.get_closest_marker("topology")
    name = marker.args[0] if marker and marker.args else None
    if name not in TOPOLOGIES:
        known = ", ".join(TOPOLOGIES)
        reason = f"{item.nodeid} needs pytest.mark.topology(NAME), one of: {known}"
        raise LabError(reason)
    return TOPOLOGIES[name]


def _is_of(item: pytest.Item, topology: Topology) -> bool:
    """Return whether a test runs in a topology."""
    marker = item.get_closest_marker("topology")
    return marker is not None and marker.args[:1] == (topology.name,)


def _job(config: pytest.Config, items: list[pytest.Item]) -> Job:
    """Return the guest's run of pytest."""
    selected = json.dumps([item.nodeid for item in items])
    return Job(
        _pytest_command(config, items),
        config.rootpath,
        environment={"PY_COLORS": "0"},
        results={SELECTED: selected, REPORTS: ""},
    )


def _pytest_command(config: pytest.Config, items: list[pytest.Item]) -> list[str]:
    """Return the command that runs the modules of some tests in the guest."""
    files = dict.fromkeys(str(item.path) for item in items)
    inifile = ["-c", str(config.inipath)] if config.inipath else []
    # The machine's pytest measures coverage and distributes tests, where it is told to.
    off = [
        option
        for plugin, option in (("_cov", "--no-cov"), ("xdist", "-n0"))
        if config.pluginmanager.hasplugin(plugin)
    ]
    plugins = ["-p", "tests.lab.reporter", "-p", "no:cacheprovider"]
    rootdir = ["--rootdir", str(config.rootpath)]
    return [sys.executable, "-m", "pytest", *inifile, *rootdir, *plugins, *off, *files]


def _required() -> bool:
    """Return whether a laboratory that cannot run is a failure."""
    return os.environ.get("CI") == "true" or os.environ.get("VFIOMGR_LAB") == "required"


def _report(item: pytest.Item, outcome: str, reason: str) -> pytest.TestReport:
    """Return a report that was not made in a guest."""
    place = (str(Path(__file__)), 1, f"Skipped: {reason}")
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords={},
        outcome="skipped" if outcome == "skipped" else "failed",
        longrepr=place if outcome == "skipped" else reason,
        when="setup" if outcome == "skipped" else "call",
    )
