"""pytest plugin of the machine: lab tests run in guests and report as if they had run here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.costs import PROCESSOR_TIME
from tests.lab import packages
from tests.lab.errors import LabError
from tests.lab.guests import Guests, Kind
from tests.lab.platforms import PLATFORMS, Platform
from tests.lab.topology import TOPOLOGIES, Topology

if TYPE_CHECKING:
    from collections.abc import Iterator


class LabRun:
    """The laboratory of one pytest session."""

    def __init__(self, session: pytest.Session) -> None:
        self._config = session.config
        self._missing = packages.missing()
        self._guests: Guests | None = None
        if not self._missing:
            self._guests = Guests(session.config, _by_kind(session.items))

    def reports(self, item: pytest.Item) -> Iterator[pytest.TestReport]:
        """Yield the reports of one test, as they come."""
        if self._guests is None:
            yield _without(item, self._lacks())
            return
        try:
            topology_of(item)
            if platform_of(item).release and os.geteuid() != 0:
                yield _without(item, "only root can make a root of another release")
                return
            for data, spent in self._guests.reports(item.nodeid):
                yield self._revived(data, spent)
        except LabError as error:
            yield _report(item, "failed", str(error))

    def lines(self) -> list[str]:
        """What the guests cost, for the end of the session."""
        return [] if self._guests is None else self._guests.costs

    def close(self) -> None:
        """End all guests."""
        if self._guests is not None:
            self._guests.close()

    def _revived(self, data: object, spent: float) -> pytest.TestReport:
        """Return a report that crossed from the guest as JSON, with what it cost the machine."""
        hook = self._config.hook
        report = hook.pytest_report_from_serializable(config=self._config, data=data)
        assert isinstance(report, pytest.TestReport)
        # The place and reason of a skip: JSON has no tuples, and pytest insists on one.
        if isinstance(report.longrepr, list):
            path, line, reason = report.longrepr
            report.longrepr = (path, line, reason)
        setattr(report, PROCESSOR_TIME, spent)
        return report

    def _lacks(self) -> str:
        """Return what is to be installed."""
        command = packages.install_command(self._missing)
        return f"the laboratory lacks {', '.join(self._missing)}: {command}"


def topology_of(item: pytest.Item) -> Topology:
    """Return the topology that a test's markers name; LabError where they name none."""
    if name := _name(item):
        return TOPOLOGIES[name]
    known = ", ".join(TOPOLOGIES)
    reason = f"{item.nodeid} needs pytest.mark.topology(NAME), one of: {known}"
    raise LabError(reason)


def is_of_laboratory(item: pytest.Item) -> bool:
    """Return whether a test runs in a guest."""
    return item.get_closest_marker("topology") is not None


def _name(item: pytest.Item) -> str | None:
    """Return the topology that a test's markers name, where there is such a one.

    That of `platforms` is for the platforms that it names.
    """
    marker = item.get_closest_marker("topology")
    if marker is None:
        return None
    name = marker.args[0] if marker.args else None
    further = item.get_closest_marker("platforms")
    if further and platform_of(item).name in further.args:
        name = further.kwargs.get("topology", name)
    return name if name in TOPOLOGIES else None


def platform_of(item: pytest.Item) -> Platform:
    """Return the platform that a test is for."""
    assert isinstance(item, pytest.Function)
    return PLATFORMS[str(item.callspec.params["platform"])]


def is_for_platform(item: pytest.Item) -> bool:
    """Return whether a test runs on its platform at all."""
    marker = item.get_closest_marker("platforms")
    is_limited = marker is not None and marker.kwargs.get("only", False)
    return marker is None or not is_limited or platform_of(item).name in marker.args


def _by_kind(items: list[pytest.Item]) -> dict[Kind, list[pytest.Item]]:
    """Return the laboratory's tests, by the kind of guest that runs them."""
    tests: dict[Kind, list[pytest.Item]] = {}
    for item in items:
        if name := _name(item):
            platform = platform_of(item)
            if platform.release and os.geteuid() != 0:
                continue
            kind = Kind(TOPOLOGIES[name], platform)
            tests.setdefault(kind, []).append(item)
    return tests


def _required() -> bool:
    """Return whether a laboratory that cannot run is a failure."""
    return os.environ.get("CI") == "true" or os.environ.get("VFIOMGR_LAB") == "required"


def _without(item: pytest.Item, reason: str) -> pytest.TestReport:
    """Return a skip, or a failure where the laboratory is required."""
    return _report(item, "failed" if _required() else "skipped", reason)


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
