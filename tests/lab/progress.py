"""Deadlines that count what a program does, not the clock of a machine that is busy with others."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_SHARE = 0.1


def processor_time(pid: int) -> float:
    """Return the seconds that a process has computed, by its stat; 0 where there is none.

    Its children count once it has waited for them.
    """
    with suppress(FileNotFoundError, ProcessLookupError):
        # The name in parentheses may hold anything; utime, stime, cutime, cstime: see proc(5).
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS
    return 0.0


class Patience:
    """How long to wait for something that a process does.

    It is over after `limit` seconds in which the process computed less than a tenth of that, so
    that a machine with other work does not bring it nearer; and in any case, for a process that
    goes round in circles, once it has computed for `most` seconds.
    """

    def __init__(self, limit: float, *pids: int, most: float | None = None) -> None:
        self._limit = limit
        self._most = 5 * limit if most is None else most
        self._pids = pids
        self.restart()

    def restart(self) -> None:
        """Wait as long again: something came."""
        self._first = self._computed()
        self._step(self._first)

    @property
    def is_over(self) -> bool:
        """Whether nothing is to be expected any more."""
        computed = self._computed()
        if computed - self._last >= self._limit * _SHARE:
            self._step(computed)
        late = time.monotonic() - self._since > self._limit
        return late or computed - self._first > self._most

    @property
    def why(self) -> str:
        """What it waited for in vain, for a person."""
        computed = self._computed() - self._first
        if computed > self._most:
            return f"it computed for {computed:.0f} s"
        return f"it computed for {computed:.0f} s and then stood still for {self._limit:.0f} s"

    def _step(self, computed: float) -> None:
        self._last = computed
        self._since = time.monotonic()

    def _computed(self) -> float:
        return sum(map(processor_time, self._pids))
