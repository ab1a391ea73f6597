"""Measure, and print one table: `make bench`, or python -m benchmarks --help."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import TYPE_CHECKING

from benchmarks import agent, binding, claims, commands, fleet, laboratory, simulation
from benchmarks.table import render

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.table import Row


def main() -> int:
    """Measure, print, and return 1 where a budget is exceeded."""
    options = _parser().parse_args()
    parts: dict[str, Callable[[], list[Row]]] = {
        "commands": lambda: commands.measure(options.rounds, options.trees),
        "agent": lambda: agent.measure(options.trees),
        "claims": lambda: claims.measure(options.trees),
        "binding": lambda: binding.measure(options.trees),
        "simulation": lambda: simulation.measure(options.trees),
        "fleet": lambda: fleet.measure(options.trees),
    }
    if options.lab:
        parts = {"laboratory": lambda: laboratory.measure(options.rounds, options.bind_rounds)}
    rows: list[Row] = []
    for name in options.only or parts:
        begun = time.monotonic()
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        rows += parts[name]()
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    print(render(rows))
    exceeded = [row for row in rows if not row.is_kept]
    if exceeded:
        print(f"{len(exceeded)} of {sum(row.budget is not None for row in rows)} over budget")
    return 1 if exceeded else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of what only reads (7)")
    parser.add_argument("--bind-rounds", type=int, default=5, help="of binding functions (5)")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--lab", action="store_true", help="measure in the laboratory, where a real kernel answers"
    )
    where.add_argument(
        "--only",
        action="append",
        choices=("commands", "agent", "claims", "binding", "simulation", "fleet"),
        help="measure this part (all)",
    )
    parser.add_argument(
        "--trees",
        metavar="DIR",
        default="/dev/shm" if os.path.isdir("/dev/shm") else None,
        help="where made trees lie meanwhile (/dev/shm; they take 0.6 GB there)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
