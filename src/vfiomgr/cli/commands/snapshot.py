"""`vfiomgr snapshot`."""

from __future__ import annotations

import json

import click

from vfiomgr.cli.options import session_options
from vfiomgr.cli.output import print_text, print_yaml
from vfiomgr.cli.session import Session, pass_session
from vfiomgr.snapshot.document import write_snapshot


@click.command("snapshot")
@session_options("format", "root")
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
