"""`vfiomgr check`."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

import click

from vfiomgr import api
from vfiomgr.cli.output import note, print_document
from vfiomgr.cli.session import Session, session_options
from vfiomgr.model.readiness import SEVERITIES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.model.readiness import Finding, Report, Severity

_COLOURS = {"blocker": "red", "warning": "yellow", "info": "cyan", "ok": "green"}
_BLOCKED = 1


@click.command("check")
@click.option("--all", "every", is_flag=True, help="Show also what is fine.")
@session_options()
@click.pass_context
def check(context: click.Context, *, every: bool) -> None:
    """Say whether this host is ready: each finding with evidence, why it matters, its remedy.

    A blocker keeps every device from going to a guest; a warning concerns some of them, or their
    safety; an info is to be known. JSON and YAML always hold what is fine too.

    Exit status: 0 where nothing blocks, 1 where a blocker was found.

    \b
    Examples:
      vfiomgr check
      vfiomgr check --all
      vfiomgr check --format json
      vfiomgr check --snapshot host.json
    """
    session: Session = context.obj
    report = api.check(session.host(with_readiness=True))
    if session.format != "table":
        print_document("CheckReport", _document(report), session.format)
    else:
        _print(report, every=every)
    context.exit(_BLOCKED if report.is_blocked else 0)


def _document(report: Report) -> dict[str, object]:
    return {
        "items": report.findings,
        "not_checked": report.not_checked,
        "summary": {severity: report.count(severity) for severity in SEVERITIES},
    }


def _print(report: Report, *, every: bool) -> None:
    shown = [f for f in report.findings if every or f.severity != "ok"]
    for finding in shown:
        click.echo(f"{_painted(finding.severity)}: {finding.title}")
        for label, text in _lines(finding):
            _print_line(label, text)
    click.echo(_summary(report, every=every))
    for text in report.not_checked:
        note(f"not checked: {text}")


def _painted(severity: Severity) -> str:
    """In colour on a terminal that has not declined it (no-color.org); click knows a pipe."""
    if os.environ.get("NO_COLOR"):
        return severity
    return click.style(severity, fg=_COLOURS[severity], bold=True)


def _lines(finding: Finding) -> Iterator[tuple[str, str]]:
    yield from (("evidence", text) for text in finding.evidence)
    yield "why", finding.why
    if finding.remedy:
        yield "remedy", finding.remedy


def _print_line(label: str, text: str) -> None:
    """Wrapped to a terminal; in a pipe one line each, for grep."""
    head = f"  {label.ljust(8)}  "
    if not sys.stdout.isatty():
        click.echo(head + text)
        return
    click.echo(
        textwrap.fill(
            text,
            width=max(shutil.get_terminal_size().columns, len(head) * 3),
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_long_words=False,
            break_on_hyphens=False,
        )
    )


def _summary(report: Report, *, every: bool) -> str:
    verdict = "not ready" if report.is_blocked else "nothing blocks"
    counts = [_counted(report, severity) for severity in ("blocker", "warning", "info")]
    fine = f"{report.count('ok')} fine{'' if every else ' (--all shows them)'}"
    return f"{verdict}: {', '.join((*counts, fine))}"


def _counted(report: Report, severity: Severity) -> str:
    count = report.count(severity)
    return f"{count} {severity}{'' if count == 1 else 's'}"
