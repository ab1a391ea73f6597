"""`vfiomgr snapshot`."""

from __future__ import annotations

import click

from vfiomgr.cli.session import Session, common_options


@click.command("snapshot")
@common_options()
@click.pass_obj
def snapshot(session: Session) -> None:
    """Print all facts of the host as JSON, to answer from elsewhere with --snapshot.

    \b
    Examples:
      vfiomgr snapshot > host.json
      vfiomgr --snapshot host.json bind 04:00.0 --dry-run
    """
    from vfiomgr.model.snapshot import write_snapshot  # noqa: PLC0415

    click.echo(write_snapshot(session.host(with_users=True)), nl=False)
