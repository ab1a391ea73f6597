"""`vfiomgr metrics`, `metrics install`, `metrics uninstall` and `metrics accept`."""

from __future__ import annotations

from importlib import import_module

import click

from vfiomgr.cli.options import CHANGING, LazyGroup, directory_option, file_option, session_options
from vfiomgr.cli.output import note, print_text
from vfiomgr.engine.changes import change
from vfiomgr.errors import forbid_together
from vfiomgr.host.installation import optional
from vfiomgr.host.rewrite import rewrite
from vfiomgr.metrics.model import METRICS
from vfiomgr.metrics.samples import check_samples
from vfiomgr.metrics.timer import installation, removal
from vfiomgr.persistence.named import program_for_units
from vfiomgr.snapshot.session import Session, pass_session, session_of

_MODE = 0o644
"""node-exporter runs as another user."""
_COMMANDS = {
    "install": ("vfiomgr.metrics.commands", "install"),
    "uninstall": ("vfiomgr.metrics.commands", "uninstall"),
    "accept": ("vfiomgr.metrics.commands", "accept"),
}


@click.group("metrics", cls=LazyGroup, table=_COMMANDS, invoke_without_command=True)
@file_option("--output", "out", text="Write the metrics to a file, and remember the devices.")
@session_options("root", "snapshot")
@click.pass_context
def metrics(context: click.Context, *, out: str | None) -> None:
    """Print metrics for Prometheus, or install a timer for them.

    Without a subcommand, print the metrics of this host in Prometheus' text format, for the
    textfile collector of node-exporter: devices and their links, errors and guests, vGPUs, missing
    devices, drift from the installed layout, findings of `vfiomgr check`, and failed units. A value
    that is unknown has no sample. No sleeping device is woken.

    With --output, the file is replaced at once. New devices are added to
    /var/lib/vfiomgr/devices.json; a device that is there and not found is reported as missing.

    \b
    Examples:
      vfiomgr metrics
      vfiomgr metrics --output /var/lib/prometheus/node-exporter/vfiomgr.prom
      vfiomgr metrics install --dry-run
      vfiomgr metrics --snapshot host.json
    """
    if context.invoked_subcommand is not None:
        if out is not None:
            forbid_together("--output", "a subcommand", "a subcommand prints no metrics")
        return
    session = session_of(context)
    render = optional("vfiomgr.metrics.render", "print metrics", "node").render_textfile
    collecting = import_module("vfiomgr.metrics.collect")  # slow, by layouts
    host, facts = collecting.collect(session)
    if host.users.processes is None and session.is_live:
        note("not measured: which guests have devices: requires root on a running host")
    text = render(check_samples(host, facts), METRICS)
    if out is None:
        print_text(text)
        return
    rewrite(out, None, text.encode(), mode=_MODE)
    if session.is_live:
        collecting.remember(session, host, facts)


@click.command("install")
@directory_option(
    "--directory", text="The directory that node-exporter reads.  [default: that of its package]"
)
@session_options(*CHANGING)
@pass_session
def install(session: Session, *, directory: str | None) -> None:
    """Install a timer that writes metrics for node-exporter.

    Writes vfiomgr-metrics.service and vfiomgr-metrics.timer, and starts the timer: the file
    vfiomgr.prom in DIR is written a minute after boot, then every five minutes.

    \b
    Examples:
      vfiomgr metrics install --dry-run
      vfiomgr metrics install
      vfiomgr metrics install --directory /var/lib/node_exporter/textfile_collector
    """
    optional("vfiomgr.metrics.render", "print metrics", "node")  # as the timer needs it
    session.require_live("a snapshot cannot be changed", "run it on the host itself")
    request = installation(session.files, directory, program_for_units(session))
    outcome = change(session, request)
    if outcome is not None and outcome.is_changed and session.format == "table":
        note("undo with: vfiomgr metrics uninstall")


@click.command("uninstall")
@session_options(*CHANGING)
@pass_session
def uninstall(session: Session) -> None:
    """Remove the timer for metrics, and the metrics that it wrote.

    The record of devices is removed too.

    \b
    Examples:
      vfiomgr metrics uninstall --dry-run
      vfiomgr metrics uninstall
    """
    session.require_live("a snapshot cannot be changed", "run it on the host itself")
    change(session, removal(session.files))


@click.command("accept")
@session_options(*CHANGING)
@pass_session
def accept(session: Session) -> None:
    """Record the present devices, so that removed ones are not missing.

    \b
    Examples:
      vfiomgr metrics accept --dry-run
      vfiomgr metrics accept
    """
    acceptance = import_module("vfiomgr.metrics.collect").acceptance  # slow, by layouts
    session.require_live("a snapshot cannot be changed", "run it on the host itself")
    change(session, acceptance(session))
