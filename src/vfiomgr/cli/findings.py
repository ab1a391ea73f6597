"""Findings as people and programs read them: of `vfiomgr check` and of a preflight."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from vfiomgr.check.model import SEVERITIES
from vfiomgr.documents.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.check.model import Finding, Report, Severity
from vfiomgr.cli.output import Marked, say

_COLOURS = {"blocker": "red", "warning": "yellow", "info": "cyan", "ok": "green"}


def report_document(report: Report) -> dict[str, object]:
    """A report in the JSON contract."""
    return {
        "items": report.findings,
        "not_checked": report.not_checked,
        "summary": {severity: report.count(severity) for severity in SEVERITIES},
    }


def print_findings(report: Report, *, every: bool) -> None:
    """Each finding with evidence, why it matters and its remedy; what is fine where `every`."""
    for finding in report.findings:
        if every or finding.severity != "ok":
            colour = _COLOURS[finding.severity]
            say(Marked(finding.severity, colour, f": {finding.title}"))
            for label, text in _lines(finding):
                _print_line(label, text)


def counted(report: Report, severity: Severity) -> str:
    """`2 blockers`."""
    count = report.count(severity)
    return f"{count} {severity}{'' if count == 1 else 's'}"


def _lines(finding: Finding) -> Iterator[tuple[str, str]]:
    yield from (("evidence", text) for text in finding.evidence)
    yield "why", finding.why
    if finding.remedy:
        yield "remedy", finding.remedy


def _print_line(label: str, text: str) -> None:
    """Wrapped to a terminal; in a pipe one line each, for grep."""
    head = f"  {label.ljust(8)}  "
    if not sys.stdout.isatty():
        say(head + text)
        return
    wrapped = textwrap.wrap(
        printable(text),
        width=max(shutil.get_terminal_size().columns, len(head) * 3),
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )
    say(*wrapped)
