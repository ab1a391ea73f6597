"""`vfiomgr check`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.changes import host_of
from vfiomgr.cli.findings import counted, print_findings, report_document
from vfiomgr.cli.options import session_options
from vfiomgr.cli.output import note, print_document, say
from vfiomgr.cli.session import session_of

if TYPE_CHECKING:
    from vfiomgr.check.model import Report

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
    session = session_of(context)
    report = host_of(session).check()
    if session.format != "table":
        print_document("CheckReport", report_document(report), session.format)
    else:
        _print(report, every=every)
    context.exit(_BLOCKED if report.is_blocked else 0)


def _print(report: Report, *, every: bool) -> None:
    print_findings(report, every=every)
    say(_summary(report, every=every))
    for text in report.not_checked:
        note(f"not checked: {text}")


def _summary(report: Report, *, every: bool) -> str:
    verdict = "not ready" if report.is_blocked else "nothing blocks"
    counts = [counted(report, severity) for severity in ("blocker", "warning", "info")]
    fine = f"{report.count('ok')} fine{'' if every else ' (--all shows them)'}"
    return f"{verdict}: {', '.join((*counts, fine))}"
