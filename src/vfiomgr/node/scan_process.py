"""The scanning process: it reads and changes the host, next to the agent that serves gRPC.

A read that the kernel does not return from holds up this process, and the agent still answers.
Questions come from the standard input, and reports go to the standard output.
"""

from __future__ import annotations

import os
import select
import time
from typing import TYPE_CHECKING

from vfiomgr.host.udev import DeviceChanges
from vfiomgr.node.messages import write
from vfiomgr.node.scanner import Scanner

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.library import Host
    from vfiomgr.node.messages import Report
    from vfiomgr.node.scanner import Measured

QUIET = 0.25
"""Seconds without an event before a scan."""
STORM = 3.0
"""Seconds of continuous events after which the host is scanned anyway."""
_BYTES = 1 << 16


def serve(host: Host, source: int, sink: int, measured: Measured | None = None) -> None:
    """Answer questions, and report after events and from time to time, until `source` ends."""
    scanner = Scanner(host, measured)
    try:
        _serve(scanner, host, source, sink)
    finally:
        scanner.close()


def _serve(scanner: Scanner, host: Host, source: int, sink: int) -> None:
    changes = DeviceChanges(host.tree) if host.tree.is_machine else None
    watched = [source, *(() if changes is None else (changes.fileno(),))]
    unread = b""
    due = glance_at = 0.0
    while True:
        rest = min(due, glance_at) - time.monotonic()
        ready, _, _ = select.select(watched, [], [], max(0.0, rest))
        reports: Iterable[Report] = ()
        if source in ready:
            data = os.read(source, _BYTES)
            if not data:
                return
            *lines, unread = (unread + data).split(b"\n")
            reports = scanner.answers(lines, has_events=changes is not None)
        elif ready or time.monotonic() >= due or scanner.has_errors():
            reports = (_observe(scanner, changes, has_event=bool(ready)),)
        for report in reports:
            _write_all(sink, write(report))
            due = time.monotonic() + scanner.pause(has_events=changes is not None)
        glance_at = time.monotonic() + scanner.pause_of_glances()


def _observe(scanner: Scanner, changes: DeviceChanges | None, *, has_event: bool) -> Report:
    """The report after an event, or after a pause; without a source of events, of all."""
    if changes is None:
        return scanner.scan()
    if not has_event:
        return scanner.look()
    _await_quiet(changes)
    return scanner.follow(changes.take())


def _await_quiet(changes: DeviceChanges) -> None:
    """Wait for the end of a burst of events."""
    end = time.monotonic() + STORM
    while changes.wait(QUIET) and time.monotonic() < end:
        pass


def _write_all(sink: int, data: bytes) -> None:
    while data:
        data = data[os.write(sink, data) :]
