"""The rules of `vfiomgr check` for each host of a fleet, summarized by rule; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import SEVERITIES, Severity
from vfiomgr.fleet.model import cards_of, name_of_file, natural
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vfiomgr.snapshot.created import Created
    from vfiomgr.snapshot.model import HostSnapshot


class Finding(Value):
    """The findings of a rule of one severity on a host."""

    rule: str
    severity: Severity
    summary: str
    """Of the first finding."""


class HostReport(Value):
    """What `check` finds on a host."""

    name: str
    time: str | None
    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]
    """Facts that decide the result and are not in the snapshot."""
    path: str = ""
    """The file of its snapshot."""
    cards: dict[str, str] = {}  # noqa: RUF012 - msgspec copies it
    """The addresses of its GPUs, with their serial numbers; empty if unknown."""


class RuleSummary(Value):
    """A rule that has findings on some hosts."""

    rule: str
    severity: Severity
    hosts: tuple[str, ...]
    summary: str
    """The first finding; after the name of the first of these hosts if others have another one."""


def report_of(host: HostSnapshot, created: Created, path: str) -> HostReport:
    """What `check` finds on a host."""
    from vfiomgr.check.plan import check  # noqa: PLC0415 - slow, and a complete index needs none

    report = check(host)
    found: dict[tuple[str, Severity], Finding] = {}
    for one in report.findings:
        if one.severity != "ok":
            finding = Finding(one.rule, one.severity, one.summary)
            found.setdefault((one.rule, one.severity), finding)
    name = created.host_name or name_of_file(path)
    findings = tuple(found.values())
    return HostReport(name, created.time, findings, report.unknown, cards=cards_of(host))


def by_rule(reports: Iterable[HostReport]) -> tuple[RuleSummary, ...]:
    """The findings of all hosts by rule, the most severe and most frequent first."""
    found: dict[tuple[str, Severity], dict[str, str]] = {}
    for report in reports:
        for one in report.findings:
            found.setdefault((one.rule, one.severity), {})[report.name] = one.summary
    every = [
        RuleSummary(rule, severity, tuple(sorted(of, key=natural)), _of_all(of))
        for (rule, severity), of in found.items()
    ]
    return tuple(sorted(every, key=lambda r: (SEVERITIES.index(r.severity), -len(r.hosts), r.rule)))


def _of_all(summaries: Mapping[str, str]) -> str:
    """The finding of a rule on several hosts, or that of the first one with its name."""
    first = min(summaries, key=natural)
    is_same = len(set(summaries.values())) == 1
    return summaries[first] if is_same else f"{first}: {summaries[first]}"
