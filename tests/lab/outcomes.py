"""What each module of the laboratory came to on each platform, as a table for the end of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from tests.lab.platforms import PLATFORMS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

OUTCOMES = ("passed", "failed", "error", "skipped")
_WIDTH = 26


def table(outcomes: Iterable[tuple[str, str]], costs: Mapping[str, float]) -> list[str]:
    """Return a line for each module, from pairs of node id and outcome, and costs by node id.

    Without tests on more than one platform there is nothing to compare.
    """
    counts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for nodeid, outcome in outcomes:
        if platform := _platform(nodeid):
            counts[_module(nodeid), platform][outcome] += 1
    for nodeid, cost in costs.items():
        if platform := _platform(nodeid):
            seconds[_module(nodeid), platform] += cost
    names = [name for name in PLATFORMS if any(name == platform for _, platform in counts)]
    if len(names) < 2:
        return []
    modules = sorted({module for module, _ in counts})
    first = max(map(len, modules)) + 2
    lines = ["".join([" " * first, *(name.ljust(_WIDTH) for name in names)]).rstrip()]
    for module in modules:
        cells = [_cell(counts[module, name], seconds[module, name]) for name in names]
        lines.append("".join([module.ljust(first), *(c.ljust(_WIDTH) for c in cells)]).rstrip())
    return lines


def _cell(count: Counter[str], seconds: float) -> str:
    """`14 passed, 80 s`."""
    shown = [f"{number} {outcome}" for outcome, number in sorted(count.items(), reverse=True)]
    return ", ".join([*shown, f"{seconds:.0f} s"]) if shown else "-"


def _module(nodeid: str) -> str:
    """Return the name of a test's file, e.g. test_main_job."""
    return nodeid.partition("::")[0].rpartition("/")[2].removesuffix(".py")


def _platform(nodeid: str) -> str:
    """Return the platform that a node id names among its parameters; the empty text if none."""
    parameters = nodeid.partition("[")[2].removesuffix("]").split("-")
    return next((word for word in parameters if word in PLATFORMS), "")
