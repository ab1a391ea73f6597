"""Looks whether a host stays as a layout wants it, tells what comes and goes, and puts it right.

`passthrough/watch.py` is something else: it has persisted functions before their host drivers do.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Literal, Protocol

from vfiomgr.diagnostic import Diagnostic
from vfiomgr.errors import VfiomgrError
from vfiomgr.layout.parts import Difference
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vfiomgr.engine.run import Outcome
    from vfiomgr.layout.compare import Comparison
    from vfiomgr.layout.requests import ApplyLayout

    Correct = Callable[[ApplyLayout, str], Outcome | VfiomgrError | None]

QUIET = 0.25
"""Seconds without an event, after which a look is worth its while."""
STORM = 3.0
"""Seconds of events without a pause, after which a look is due all the same."""
GLANCE = 2.0
"""Seconds until a layout that was written anew counts."""
IDLE = 300.0
"""Seconds until a look without any event: who owns a node changes without one."""
_FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 900.0
"""Seconds until something is tried again; twice as long each time."""
_CALM = 600.0
"""Seconds after which a device that is moved again was not moved in a fight."""


class WatchEvent(Value):
    """A difference that came, that went, that was ended here, or that could not be."""

    event: Literal["drift", "resolved", "corrected", "failed"]
    device: str = ""
    """Empty where a device is missing, or where it is about no device at all."""
    name: str = ""
    found: str = ""
    wanted: str = ""
    message: str = ""
    """Of what failed: why."""
    remedy: str = ""

    def __str__(self) -> str:
        """`drift 0000:41:00.0 (NVIDIA A40): host (nvidia) -> passthrough (VFIO)`."""
        device = f"{self.device} ({self.name})" if self.name else self.device
        start = f"{self.event} {device}: " if device else f"{self.event} "
        if self.event == "failed":
            return f"{start}{self.message}; {self.remedy}" if self.remedy else start + self.message
        found = f"{self.found} -> " if device and self.event == "drift" else ""
        return f"{start}{found}{self.wanted}"


class Changes(Protocol):
    """Where events come from."""

    def wait(self, seconds: float) -> bool:
        """Whether one comes within some seconds; returns with the first."""


class LayoutSource(Protocol):
    """Where the layout comes from, which may change while it is watched."""

    def read(self) -> ApplyLayout:
        """The layout as it is now.

        Raises:
            VfiomgrError: there is none.

        """

    def is_stale(self) -> bool:
        """Whether it has changed since it was read."""


class _Case(Value):
    """All that stands under one device and differs."""

    differences: tuple[Difference, ...]
    diagnostics: tuple[Diagnostic, ...]


class _Attempt(Value):
    """The last time that something was put right, or was not."""

    at: float
    count: int
    failed: _Case | None
    """What was left; None where it was put right."""

    @property
    def pause(self) -> float:
        """Seconds until the next one."""
        return float(min(_FIRST_PAUSE * 2 ** (self.count - 1), _LONGEST_PAUSE))

    def wait(self, case: _Case, now: float) -> float:
        """Seconds until it may be tried again; at once where what failed has changed."""
        if self.failed is not None and self.failed != case:
            return 0.0
        return max(0.0, self.at + self.pause - now)

    def is_history(self, case: _Case, now: float) -> bool:
        """Whether it says nothing of the next one."""
        if self.failed is not None:
            return self.failed != case
        return now - self.at > _CALM + self.pause


class LayoutWatch:
    """What was told, and what was tried; without `correct` nothing is."""

    def __init__(
        self,
        source: LayoutSource,
        compare: Callable[[ApplyLayout], Comparison],
        tell: Callable[[WatchEvent], None],
        correct: Correct | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._source = source
        self._request = source.read()
        self._compare = compare
        self._tell = tell
        self._correct = correct
        self._known: dict[tuple[str, str], Difference] = {}
        self._attempts: dict[str, _Attempt] = {}
        self._failures: dict[str, str] = {}
        """What was told last of each device that cannot be put right."""

    def is_stale(self) -> bool:
        """Whether the layout has changed."""
        return self._source.is_stale()

    def look(self) -> float:
        """Compare, tell and put right; the seconds after which another look is due."""
        self._read_again()
        try:
            return self._look()
        except VfiomgrError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise
            self._tell_failure("", error.message, error.hint)
            return _FIRST_PAUSE

    def _read_again(self) -> None:
        if not self._source.is_stale():
            return
        try:
            self._request = self._source.read()
        except VfiomgrError as error:
            details = "; ".join((error.message, *error.details))
            self._tell_failure("", f"{details}; the layout before stays in force", error.hint)

    def _look(self) -> float:
        compared = self._compare(self._request)
        self._tell_changes(compared.differences, frozenset())
        if self._correct is None:
            return IDLE
        cases: Mapping[str, _Case] = _cases(compared)
        due = [name for name, case in cases.items() if self._is_due(name, case)]
        if due:
            cases = self._put_right(due, cases, self._correct)
        self._forget(cases)
        waits = (self._attempts[n].wait(c, self.clock()) for n, c in self._held_back(cases))
        return min(waits, default=IDLE)

    def _is_due(self, name: str, case: _Case) -> bool:
        """Whether to try now; what is refused, or was moved again too soon, is told."""
        if case.diagnostics:
            reasons = "; ".join(diagnostic.summary for diagnostic in case.diagnostics)
            remedies = dict.fromkeys(diagnostic.hint for diagnostic in case.diagnostics)
            self._tell_failure(name, reasons, "; ".join(remedies))
            return False
        attempt = self._attempts.get(name)
        wait = 0.0 if attempt is None else attempt.wait(case, self.clock())
        if attempt is not None and attempt.failed is None and wait:
            again = f"it was moved again after it was put right, which waits {attempt.pause:.0f} s"
            self._tell_failure(name, again, "find out who moves it; journalctl and dmesg may tell")
        return not wait

    def _put_right(
        self, due: Iterable[str], cases: Mapping[str, _Case], correct: Correct
    ) -> Mapping[str, _Case]:
        results = {name: correct(self._request, name) for name in due}
        compared = self._compare(self._request)
        after = _cases(compared)
        now = self.clock()
        for name, result in results.items():
            last, case = self._attempts.get(name), cases[name]
            count = 1 if last is None or last.is_history(case, now) else last.count + 1
            self._attempts[name] = _Attempt(now, count, after.get(name))
            if isinstance(result, VfiomgrError):
                self._tell_failure(name, result.message, result.hint)
        corrected = {d.device for n in results if n not in after for d in cases[n].differences}
        self._tell_changes(compared.differences, corrected)
        return after

    def _held_back(self, cases: Mapping[str, _Case]) -> list[tuple[str, _Case]]:
        """What is tried again by itself; a refusal waits for what it is about."""
        return [(n, c) for n, c in cases.items() if n in self._attempts and not c.diagnostics]

    def _forget(self, cases: Mapping[str, _Case]) -> None:
        for name in [name for name in self._failures if name not in cases]:
            del self._failures[name]
        for name, attempt in tuple(self._attempts.items()):
            if name not in cases and attempt.failed is not None:
                del self._attempts[name]

    def _tell_changes(
        self, differences: Iterable[Difference], corrected: set[str] | frozenset[str]
    ) -> None:
        now = {(d.device, d.wanted): d for d in differences}
        for key, gone in self._known.items():
            if key not in now:
                event: Literal["corrected", "resolved"]
                event = "corrected" if gone.device in corrected else "resolved"
                self._tell(_event_of(event, gone))
        for key, came in now.items():
            if self._known.get(key) != came:
                self._tell(_event_of("drift", came))
        self._known = now

    def _tell_failure(self, name: str, message: str, remedy: str) -> None:
        """Tell it once, until it is another or the device was right in between."""
        if self._failures.get(name) == message:
            return
        self._failures[name] = message
        self._tell(WatchEvent("failed", device=name, message=message, remedy=remedy))


def follow(watch: LayoutWatch, changes: Changes) -> None:
    """Look whenever something has happened, and it is quiet again; until the process is ended."""
    while True:
        await_reason(watch, changes, watch.look())


def await_reason(watch: LayoutWatch, changes: Changes, seconds: float) -> None:
    """Return when there is a reason to look: events, another layout, or the time."""
    end = watch.clock() + seconds
    while (left := end - watch.clock()) > 0 and not watch.is_stale():
        if changes.wait(min(left, GLANCE)):
            storm = watch.clock() + STORM
            while watch.clock() < storm and changes.wait(QUIET):
                pass
            return


def _cases(compared: Comparison) -> dict[str, _Case]:
    """What differs, by the device that it stands under."""
    found: dict[str, _Case] = {}
    for part in compared.parts:
        if not part.is_met:
            other = found.get(part.name, _Case((), ()))
            found[part.name] = _Case(
                (*other.differences, *part.differences), (*other.diagnostics, *part.diagnostics)
            )
    return found


def _event_of(
    event: Literal["drift", "resolved", "corrected"], difference: Difference
) -> WatchEvent:
    return WatchEvent(
        event, difference.device, difference.name, difference.found, difference.wanted
    )
