"""The commands `vfiomgr check` and `vfiomgr check console`."""

from __future__ import annotations

import click

from vfiomgr import check as library
from vfiomgr.cli.options import READING, LazyGroup, flag, session_options
from vfiomgr.cli.reports import exit_status, print_report, strict_option
from vfiomgr.snapshot.completion import complete_gpu
from vfiomgr.snapshot.session import session_of

_COMMANDS = {
    "console": ("vfiomgr.check.commands", "console"),
    "domain": ("vfiomgr.libvirt.commands.preflight", "preflight"),
    "migration": ("vfiomgr.libvirt.commands.migration", "migration"),
    "pod": ("vfiomgr.kata.explain.commands", "explain"),
    "kata": ("vfiomgr.kata.explain.commands", "check_image"),
    "cdi": ("vfiomgr.containers.cdi.commands", "check"),
    "layout": ("vfiomgr.layout.commands.files", "validate"),
}


@click.group("check", cls=LazyGroup, table=_COMMANDS, invoke_without_command=True)
@flag("--all", "every", text="Also show passed and skipped checks.")
@strict_option()
@session_options(*READING)
@click.pass_context
def check(context: click.Context, *, every: bool, strict: bool) -> None:
    """Check a host, console, domain, pod, layout, Kata or CDI.

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
    report = library.check(session.scan(with_readiness=True, with_health=True))
    print_report(report, "not ready", session.format, every=every)
    context.exit(exit_status(report, strict=strict))


@click.command("console")
@click.argument("address", required=False, shell_complete=complete_gpu)
@flag("--all", "every", text="Also show passed and skipped checks.")
@strict_option()
@session_options(*READING)
@click.pass_context
def console(context: click.Context, *, address: str | None, every: bool, strict: bool) -> None:
    """Check whether a guest can have a card that the desktop uses.

    Without ADDRESS, the card that shows the console is checked. The answer names the users of the
    card and how each releases it: compositors and user sessions, the greeter and the display
    manager, audio programs, services and other processes, the text console and the firmware's
    framebuffer. It lists reported reset problems, what may be lost, and what cannot work. For a
    second card, it has the settings that keep the running compositor off it.

    Sessions are read from /run/systemd/sessions. Nothing is released, written or changed. Without
    root the processes that use the card are unknown.

    Exit status: 1 for a blocker, and with --strict also for an unknown result; otherwise 0.

    \b
    Examples:
      vfiomgr check console
      vfiomgr check console 01:00.0
      vfiomgr check console --all --strict
      vfiomgr check console --snapshot host.json --format json
    """
    session = session_of(context)
    host = session.scan(with_users=True, with_readiness=True, with_desktop=True)
    report = library.check_console(host, address)
    print_report(report, "cannot be lent", session.format, every=every)
    context.exit(exit_status(report, strict=strict))
