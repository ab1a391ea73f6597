"""The command `vfiomgr check`."""

from __future__ import annotations

import click

from vfiomgr import check as library
from vfiomgr.cli.options import READING, LazyGroup, session_options
from vfiomgr.cli.reports import exit_status, print_report, strict_option
from vfiomgr.snapshot.session import session_of

_COMMANDS = {
    "domain": ("vfiomgr.libvirt.commands.preflight", "preflight"),
    "migration": ("vfiomgr.libvirt.commands.migration", "migration"),
    "pod": ("vfiomgr.kata.explain.commands", "explain"),
    "kata": ("vfiomgr.kata.explain.commands", "check_image"),
    "cdi": ("vfiomgr.containers.cdi.commands", "check"),
    "layout": ("vfiomgr.layout.commands.files", "validate"),
}


@click.group("check", cls=LazyGroup, table=_COMMANDS, invoke_without_command=True)
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="Also show passed and skipped checks.",
)
@strict_option()
@session_options(*READING)
@click.pass_context
def check(context: click.Context, *, every: bool, strict: bool) -> None:
    """Check a host, domain, pod, layout, Kata or CDI.

    Without a subcommand, check whether this host is ready for passthrough. Each finding has
    evidence, a reason and a remedy. A blocker prevents passthrough of every device; a warning
    concerns some devices, or safety. If a fact that decides the result cannot be read, the result
    is unknown. JSON and YAML include passed checks.

    Exit status: 1 for a blocker, and with --strict also for an unknown result; otherwise 0.

    \b
    Examples:
      vfiomgr check
      vfiomgr check --all
      vfiomgr check --strict
      vfiomgr check --format json
      vfiomgr check --snapshot host.json
      vfiomgr check domain win11
      vfiomgr check pod pod.yaml
    """
    if context.invoked_subcommand is not None:
        return
    session = session_of(context)
    report = library.check(session.scan(with_readiness=True))
    print_report(report, "not ready", session.format, every=every)
    context.exit(exit_status(report, strict=strict))
