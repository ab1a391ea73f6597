"""The outcomes of several runs of pytest as one summary: `make test` has two.

Each run appends a line to the file when it begins, and one with its outcomes when it ends. A run
that crashed has only the first.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

VARIABLE = "VFIOMGR_TEST_TOTALS"
"""The file; without it a run stands alone."""


class Totals(NamedTuple):
    """What is known of all runs."""

    outcomes: dict[str, Counter[str]]
    spent: dict[str, float]
    unfinished: int
    """Runs that began and did not end."""


def begin(file: str) -> None:
    """Note that a run begins."""
    _append(file, {"begins": True})


def end(file: str, outcomes: dict[str, Counter[str]], spent: dict[str, float]) -> Totals:
    """Note the outcomes of a run, and return those of all."""
    _append(file, {"outcomes": outcomes, "spent": spent})
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    ended = [line for line in lines if "outcomes" in line]
    total: dict[str, Counter[str]] = {}
    for line in ended:
        for kind, count in line["outcomes"].items():
            total[kind] = total.get(kind, Counter()) + Counter(count)
    seconds: dict[str, float] = {}
    for line in ended:
        seconds |= {kind: seconds.get(kind, 0) + cost for kind, cost in line["spent"].items()}
    return Totals(total, seconds, len(lines) - 2 * len(ended))


def _append(file: str, line: dict[str, object]) -> None:
    with Path(file).open("a") as opened:
        opened.write(json.dumps(line) + "\n")
