"""The time of whole processes: medians over rounds in which every command runs once."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def seconds(command: Sequence[str]) -> float:
    """The time from the start of a process to its end.

    Raises:
        RuntimeError: it failed, so its time means nothing.

    """
    start = time.perf_counter()
    result = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False
    )
    elapsed = time.perf_counter() - start
    if result.returncode:
        message = f"{' '.join(command)} exited with {result.returncode}: {result.stderr}"
        raise RuntimeError(message)
    return elapsed


def medians(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of each contender's times.

    All run in each round, so that a busy moment of the machine strikes all of them; a round
    before the first one fills the caches and does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, contender in contenders.items():
            elapsed = contender()
            print(f"  round {number} of {rounds}: {name}: {elapsed:.3f} s", file=sys.stderr)
            if number:
                times[name].append(elapsed)
    return {name: statistics.median(values) for name, values in times.items()}
