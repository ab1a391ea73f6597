"""The rule about the kernel log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.messages.known import clause, messages_by_name
from vfiomgr.units import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vfiomgr.check.model import Readiness
    from vfiomgr.messages.known import LoggedMessage
    from vfiomgr.snapshot.model import HostSnapshot


def kernel_log(
    host: HostSnapshot, facts: Readiness, find: Callable[..., Iterator[Diagnostic]]
) -> Iterator[Diagnostic]:
    """Report known messages about functions of this host, or about none.

    If the rules that `find` runs by name have found the cause, their finding has the remedy.
    """
    for logged in facts.kernel_log or ():
        known = messages_by_name().get(logged.name)
        if known is None or (logged.address and host.device_named(logged.address) is None):
            continue  # a snapshot of another release, or a function that was removed
        subject = f"{logged.address}: " if logged.address else ""
        causes = (one for one in find(*known.see) if one.severity in ("blocker", "warning"))
        rules = dict.fromkeys(
            one.rule for one in causes if not one.subject or logged.address in one.subject
        )
        yield finding(
            "kernel-log",
            known.severity,
            f"{subject}{clause(known.meaning)}",
            (f"kernel log{_when(logged)}: {logged.text}",),
            f"see the finding of rule {', '.join(rules)}" if rules else "",
            "" if rules else clause(known.remedy),
            subject=logged.address,
        )


def _when(logged: LoggedMessage) -> str:
    """`, 3 times, last 120 s after boot`."""
    count = f", {counted(logged.count, 'time')}, last" if logged.count > 1 else ""
    if logged.seconds is None:
        return count.removesuffix(", last")
    return f"{count or ','} {logged.seconds} s after boot"
