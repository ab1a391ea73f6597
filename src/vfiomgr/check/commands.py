"""`vfiomgr check`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.changes import host_of
from vfiomgr.cli.findings import counted, print_findings, report_document
from vfiomgr.cli.group import LazyGroup
from vfiomgr.cli.options import READING, session_options
from vfiomgr.cli.output import note, print_document, say
from vfiomgr.cli.session import session_of

if TYPE_CHECKING:
    from vfiomgr.check.model import Report

_BLOCKED = 1


_COMMANDS = {
    "domain": ("vfiomgr.libvirt.commands.preflight", "preflight"),
    "pod": ("vfiomgr.kata.explain.commands", "explain"),
    "kata": ("vfiomgr.kata.explain.commands", "check_image"),
    "cdi": ("vfiomgr.containers.cdi.commands", "check"),
    "layout": ("vfiomgr.layout.commands.files", "validate"),
}


@click.group("check", cls=LazyGroup, table=_COMMANDS, invoke_without_command=True)
@click.option("--all", "every", is_flag=True, help="Show also what is fine.")
@session_options(*READING)
@click.pass_context
def check(context: click.Context, *, every: bool) -> None:
    """Check whether this host, a domain, a pod, Kata, CDI or a layout is right.

    Without a command it checks whether this host is ready for passthrough. Each finding has its
    evidence, why it matters, and a remedy. A blocker prevents passthrough of any device; a warning
    concerns some devices, or safety. JSON and YAML include what is fine.

    Exit status: 0 if nothing blocks, 1 if a blocker was found.

    \b
    Examples:
      vfiomgr check
      vfiomgr check --all
      vfiomgr check --format json
      vfiomgr check --snapshot host.json
      vfiomgr check domain win11
      vfiomgr check pod pod.yaml
    """
    if context.invoked_subcommand is not None:
        return
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
