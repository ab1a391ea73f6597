"""Findings and errors, as text for people and as documents for programs."""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import SEVERITIES
from vfiomgr.documents.printable import printable
from vfiomgr.errors import Refusal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.check.model import Report
    from vfiomgr.cli.options import Format
    from vfiomgr.diagnostic import Diagnostic, Severity
    from vfiomgr.errors import VfiomgrError
from vfiomgr.cli.output import Marked, print_document, say

_COLOURS = {"blocker": "red", "warning": "yellow", "info": "cyan", "ok": "green"}


def finding_document(found: Diagnostic) -> dict[str, object]:
    """A finding in the JSON contract."""
    return {
        "id": found.rule,
        "severity": found.severity,
        "title": found.summary,
        "evidence": found.evidence,
        "why": found.why,
        "remedy": found.remedy,
    }


def diagnostic_document(found: Diagnostic) -> dict[str, object]:
    """A finding in the JSON contract, with its subject."""
    return {**finding_document(found), "subject": found.subject, "override": found.override}


def print_error_document(error: VfiomgrError, output: Format) -> None:
    """Print an error as a document on stderr; a refusal includes its diagnostics."""
    found = error.diagnostics if isinstance(error, Refusal) else ()
    body = {
        "message": error.message,
        "details": error.details,
        "remedy": error.hint or None,
        "exit_status": error.exit_code,
        "diagnostics": list(map(diagnostic_document, found)),
    }
    print_document("Error", body, output, err=True)


def report_document(report: Report) -> dict[str, object]:
    """A report in the JSON contract."""
    return {
        "items": [finding_document(found) for found in report.findings],
        "not_checked": report.not_checked,
        "summary": {severity: report.count(severity) for severity in SEVERITIES},
    }


def print_findings(report: Report, *, every: bool) -> None:
    """Print the findings with evidence, reason, remedy and rule; with `every`, passed ones too."""
    for found in report.findings:
        if every or found.severity != "ok":
            colour = _COLOURS[found.severity]
            say(Marked(found.severity, colour, f": {found.summary}"))
            for label, text in _lines(found):
                _print_line(label, text)


def counted(report: Report, severity: Severity) -> str:
    """`2 blockers`."""
    count = report.count(severity)
    return f"{count} {severity}{'' if count == 1 else 's'}"


def _lines(found: Diagnostic) -> Iterator[tuple[str, str]]:
    yield from (("evidence", text) for text in found.evidence)
    yield "why", found.why
    if found.remedies:
        yield "remedy", found.remedy
    yield "rule", found.rule


def _print_line(label: str, text: str) -> None:
    """Print one line of a finding: wrapped on a terminal, unwrapped in a pipe (for grep)."""
    import shutil  # noqa: PLC0415 - slow, and few need it

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
