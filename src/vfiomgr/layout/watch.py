"""Applies a layout part by part, watches for drift, and corrects it.

`passthrough/watch.py` is different: it binds persisted functions before their host drivers do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec.structs import astuple, replace

from vfiomgr.diagnostic import Diagnostic, refusal
from vfiomgr.engine.locks import require_rights
from vfiomgr.engine.transaction import ApplyContext, apply, scan_for, slots_with_serials
from vfiomgr.errors import HostError, StillDiffers, VfiomgrError
from vfiomgr.layout.compare import Comparison, compare
from vfiomgr.layout.parts import Difference
from vfiomgr.snapshot.health import keep_health
from vfiomgr.snapshot.keeping import KeptSnapshot
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.engine.host import ManagedHost
    from vfiomgr.engine.run import Outcome
    from vfiomgr.host.udev import DeviceEvents
    from vfiomgr.layout.requests import ApplyLayout
    from vfiomgr.snapshot.model import HostSnapshot

    Result = Outcome | VfiomgrError
    Correct = Callable[[ApplyLayout, str], Result | None]

QUIET = 0.25
"""Seconds without an event before the host is compared."""
STORM = 3.0
"""Seconds of continuous events after which the host is compared anyway."""
GLANCE = 2.0
"""Seconds until a changed layout file is noticed."""
IDLE = 300.0
"""Seconds between comparisons without events: the owner of a node changes without one."""
_FIRST_PAUSE, _LONGEST_PAUSE = 10.0, 900.0
"""Seconds until a retry; doubled each time."""
_ASKED = "nvidia"
"""The driver of GPUs of which nvidia-smi says something that no event announces."""
_CALM = 600.0
"""Seconds after which another change of a device is treated as new drift."""


class WatchEvent(Value):
    """A difference that appeared, was resolved or corrected, or could not be corrected."""

    event: Literal["drift", "resolved", "corrected", "failed"]
    device: str = ""
    """Empty for a missing device, or if no device is concerned."""
    name: str = ""
    found: str = ""
    wanted: str = ""
    message: str = ""
    """For a failure: the reason."""
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
    """A source of events."""

    def wait(self, seconds: float) -> bool:
        """Whether an event occurs within some seconds; returns with the first."""

    def take(self) -> DeviceEvents:
        """All events since the last call."""


class LayoutSource(Protocol):
    """The source of a layout, which may change while it is watched."""

    def read(self) -> ApplyLayout:
        """The current layout.

        Raises:
            VfiomgrError: there is none.
        """

    def is_stale(self) -> bool:
        """Whether it has changed since it was read."""


class _Case(Value):
    """All differences listed under one device."""

    differences: tuple[Difference, ...]
    diagnostics: tuple[Diagnostic, ...]


class _Attempt(Value):
    """The last attempt to correct a difference."""

    at: float
    count: int
    failed: _Case | None
    """What was left; None after a success."""

    @property
    def pause(self) -> float:
        """Seconds until the next attempt."""
        return float(min(_FIRST_PAUSE * 2 ** (self.count - 1), _LONGEST_PAUSE))

    def wait(self, case: _Case, now: float) -> float:
        """Seconds until a retry; 0 if the failure has changed."""
        if self.failed is not None and self.failed != case:
            return 0.0
        return max(0.0, self.at + self.pause - now)

    def is_history(self, case: _Case, now: float) -> bool:
        """Whether it no longer affects the next attempt."""
        if self.failed is not None:
            return self.failed != case
        return now - self.at > _CALM + self.pause


class LayoutWatch:
    """What was reported and tried; without `correct`, nothing is tried."""

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
        """The last report for each device that cannot be corrected."""

    def is_stale(self) -> bool:
        """Whether the layout has changed."""
        return self._source.is_stale()

    def look(self) -> float:
        """Compare, report and correct; returns the seconds until the next comparison."""
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
            self._tell_failure("", f"{details}; the previous layout is still used", error.hint)

    def _look(self) -> float:
        compared = self._compare(self._request)
        self._tell_changes(compared.differences, frozenset())
        if self._correct is None:
            return IDLE
        cases: Mapping[str, _Case] = _cases(compared)
        due = [name for name, case in cases.items() if self._is_due(name, case)]
        if due:
            cases = self._put_right(due, cases, self._correct)
        for name in self._failures.keys() - cases.keys():
            del self._failures[name]
        for name in self._attempts.keys() - cases.keys():
            if self._attempts[name].failed is not None:
                del self._attempts[name]
        waits = (
            self._attempts[name].wait(case, self.clock())
            for name, case in cases.items()
            if name in self._attempts and not case.diagnostics  # a refusal waits for its cause
        )
        return min(waits, default=IDLE)

    def _is_due(self, name: str, case: _Case) -> bool:
        """Whether to try now; refusals and repeated changes are reported."""
        if case.diagnostics:
            reasons = "; ".join(diagnostic.summary for diagnostic in case.diagnostics)
            remedies = dict.fromkeys(diagnostic.hint for diagnostic in case.diagnostics)
            self._tell_failure(name, reasons, "; ".join(remedies))
            return False
        attempt = self._attempts.get(name)
        wait = 0.0 if attempt is None else attempt.wait(case, self.clock())
        if attempt is not None and attempt.failed is None and wait:
            again = (
                f"it changed again after it was corrected; next attempt in {attempt.pause:.0f} s"
            )
            self._tell_failure(name, again, "find out what changes it: journalctl, dmesg")
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

    def _tell_changes(
        self, differences: Iterable[Difference], corrected: set[str] | frozenset[str]
    ) -> None:
        now = {(d.device, d.wanted): d for d in differences}
        for key, gone in self._known.items():
            if key not in now:
                event: Literal["corrected", "resolved"]
                event = "corrected" if gone.device in corrected else "resolved"
                self._tell(WatchEvent(event, *astuple(gone)))
        for key, came in now.items():
            if self._known.get(key) != came:
                self._tell(WatchEvent("drift", *astuple(came)))
        self._known = now

    def _tell_failure(self, name: str, message: str, remedy: str) -> None:
        """Report a failure once, until it changes or the device was correct in between."""
        if self._failures.get(name) == message:
            return
        self._failures[name] = message
        self._tell(WatchEvent("failed", device=name, message=message, remedy=remedy))


def follow(watch: LayoutWatch, changes: Changes) -> None:
    """Compare after each burst of events, until the process is interrupted."""
    while True:
        await_reason(watch, changes, watch.look())


def await_reason(watch: LayoutWatch, changes: Changes, seconds: float) -> None:
    """Wait for a reason to compare: events, another layout, or the time."""
    end = watch.clock() + seconds
    while (left := end - watch.clock()) > 0 and not watch.is_stale():
        if changes.wait(min(left, GLANCE)):
            storm = watch.clock() + STORM
            while watch.clock() < storm and changes.wait(QUIET):
                pass
            return


def _cases(compared: Comparison) -> dict[str, _Case]:
    """The differences, by the device that they are listed under."""
    found: dict[str, _Case] = {}
    for part in compared.parts:
        if not part.is_met:
            other = found.get(part.name, _Case((), ()))
            found[part.name] = _Case(
                (*other.differences, *part.differences), (*other.diagnostics, *part.diagnostics)
            )
    return found


def apply_parts(request: ApplyLayout, work: ApplyContext) -> tuple[tuple[str, Result], ...]:
    """Each device that differs, with the result; a missing device has no name.

    Parts that a guest can only have together (an IOMMU group of several rules) are changed
    together.
    """
    results: dict[str, Result] = {}
    while True:
        compared = compare(work.scan(request), request)
        due = [
            names
            for names in compared.bundles
            if any(n not in results for n in names if not request.only or n in request.only)
        ]
        if not due:
            break
        for names in due:  # and functions that one of them makes are there the next time
            results |= dict.fromkeys(names, _result(replace(request, only=names), work))
    for name, result in results.items():
        left = compared.left_of(name)
        if left and not isinstance(result, VfiomgrError):
            message = f"it was changed but still differs: {'; '.join(left)}"
            remedy = "find the cause: vfiomgr show, journalctl, dmesg"
            results[name] = StillDiffers(message, remedy)
    missing = (("", refusal([o])) for o in compared.diagnostics)
    return (*missing, *results.items())


def _result(request: ApplyLayout, work: ApplyContext) -> Result:
    try:
        return apply(request, work)
    except VfiomgrError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise
        return error


def watch_layout(
    host: ManagedHost,
    source: LayoutSource,
    changes: Changes,
    *,
    tell: Callable[[WatchEvent], None],
    enforce: bool = False,
) -> None:
    """Report drift from a layout until the process is interrupted.

    With `enforce`, correct it as `apply_parts` does.

    Raises:
        NeedsRoot: with `enforce`, the process may not change the host.
        RolledBack, RollbackIncomplete: a correction was interrupted.
    """
    kept = _KeptComparison(host, changes, keeps_health=enforce)

    def correct(request: ApplyLayout, name: str) -> Result | None:
        kept.doubt()
        with host.changing() as work:
            return dict(apply_parts(replace(request, only=(name,)), work)).get(name)

    if enforce:
        require_rights(host.tree)
    try:
        follow(LayoutWatch(source, kept.compare, tell, correct if enforce else None), changes)
    finally:
        kept.close()


class _KeptComparison:
    """Compares a kept snapshot after events; without events, or if it differs, scans the host.

    Whether a device may be moved depends on its users, and no event announces these. Neither does
    one announce what nvidia-smi says, so a host with GPUs on its driver is always scanned.
    """

    def __init__(self, host: ManagedHost, changes: Changes, *, keeps_health: bool) -> None:
        self._host = host
        self._keeps_health = keeps_health
        """Whether links and errors of devices are noted too, for later checks; as root."""
        self._changes = changes
        self._request: ApplyLayout | None = None
        self._kept: KeptSnapshot | None = None
        self._seen: HostSnapshot
        self._is_doubtful = True

    def close(self) -> None:
        """End the process that reads attributes."""
        if self._kept is not None:
            self._kept.close()

    def doubt(self) -> None:
        """Scan the host the next time, since its events may not have come yet."""
        self._is_doubtful = True

    def compare(self, request: ApplyLayout) -> Comparison:
        """Compare the host as it is now."""
        events = self._changes.take()
        if self._kept is None or request != self._request:
            self.close()
            self._request, self._kept = request, self._keep(request)
            self._is_doubtful = True
        if events.paths and not self._is_doubtful:
            seen = self._kept.follow(events)
            if all(device.driver != _ASKED for device in (*self._seen.devices, *seen.devices)):
                self._seen = seen
                compared = compare(seen, request)
                if not compared.differences:
                    return compared
        self._seen = self._kept.read()
        self._is_doubtful = False
        if self._keeps_health:
            try:
                keep_health(self._host.tree, self._seen)
            except HostError as error:  # the comparison does not need the record
                self._host.on_note(error.message)
        return compare(self._seen, request)

    def _keep(self, request: ApplyLayout) -> KeptSnapshot:
        """A snapshot for a layout: no disk is opened for it, which could disturb a mount."""
        tree, machine = self._host.tree, self._host.machine
        scanned = partial(scan_for, request, tree, machine, with_claims=False)
        return KeptSnapshot(tree, machine, scanned, partial(slots_with_serials, tree, request))
