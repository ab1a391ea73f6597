"""What each test costs: the processor time of its processes, or of the guest that it runs in."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pytest

PROCESSOR_TIME = "processor_time"
"""What a report is given: seconds, as an attribute that crosses to another process with it."""
_SHOWN = 10


_left_out: list[float] = []


def leave_out(seconds: float) -> None:
    """Charge no test with what a child computed that was not started for one."""
    _left_out.append(seconds)


class Stopwatch:
    """Gives each report what was computed since the one before."""

    def __init__(self) -> None:
        self._last = 0.0

    def start(self) -> None:
        """Begin with a test."""
        self._last = _computed()

    def stamp(self, report: pytest.TestReport) -> None:
        """Give a report its cost."""
        now = _computed()
        setattr(report, PROCESSOR_TIME, now - self._last)
        self._last = now


def _computed() -> float:
    """Return the seconds that this process, and each child that it has waited for, computed."""
    return sum(os.times()[:4]) - sum(_left_out)


def by_test(reports: Iterable[pytest.TestReport]) -> dict[str, float]:
    """Return the cost of each test, all its phases together."""
    costs: defaultdict[str, float] = defaultdict(float)
    for report in reports:
        costs[report.nodeid] += getattr(report, PROCESSOR_TIME, 0.0)
    return costs


def dearest(costs: dict[str, float]) -> list[str]:
    """Return the lines that tell the dearest tests."""
    shown = sorted(costs.items(), key=lambda pair: pair[1], reverse=True)[:_SHOWN]
    return [f"{cost:8.1f} s  {nodeid}" for nodeid, cost in shown]
