"""`vfiomgr snapshot`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from vfiomgr.cli.options import READING, session_options
from vfiomgr.cli.output import note, print_text, print_yaml
from vfiomgr.cli.session import Session, pass_session
from vfiomgr.snapshot.source import write_snapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.snapshot.model import HostSnapshot


@click.command("snapshot")
@session_options(*READING)
@pass_session
def snapshot(session: Session) -> None:
    """Print a snapshot of this host, for use with --snapshot.

    A snapshot contains all facts about the host as JSON or YAML. With --snapshot, other commands
    answer from it on any machine.

    \b
    Examples:
      vfiomgr snapshot > host.json
      vfiomgr --snapshot host.json bind 04:00.0 --dry-run
    """
    host = session.scan(
        with_users=True,
        with_readiness=True,
        with_resets=True,
        with_gpu_modes=True,
        with_links=True,
    )
    text = write_snapshot(host)
    if session.format == "yaml":
        print_yaml(json.loads(text))
    else:
        print_text(text)
    missing = list(_not_included(host))
    if missing and session.snapshot is None and session.tree.is_live:
        note(f"not included: {', '.join(missing)}; run vfiomgr as root on the host")


def _not_included(host: HostSnapshot) -> Iterator[str]:
    """The facts that only root of a running host can read."""
    if host.users is None:
        yield "processes"
        if host.devices and not host.reset_capabilities:
            yield "reset capabilities"
