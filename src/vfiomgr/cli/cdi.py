"""`vfiomgr cdi …`."""

from __future__ import annotations

import click

from vfiomgr.adapters.cdi import render
from vfiomgr.cli.output import note
from vfiomgr.cli.session import Session, common_options


@click.group("cdi")
def cdi() -> None:
    """Container Device Interface: specifications that name devices for container runtimes."""


@cdi.command("generate")
@click.option(
    "--kind",
    default=render.DEFAULT_KIND,
    show_default=True,
    metavar="VENDOR/CLASS",
    help="Kata wants the resource name of the kubelet plugin here.",
)
@common_options()
@click.pass_obj
def generate(session: Session, kind: str) -> None:
    """Print a CDI specification of what is bound, as JSON.

    \b
    Examples:
      vfiomgr cdi generate > /etc/cdi/vfiomgr.json
      vfiomgr cdi generate --kind nvidia.com/pgpu
    """
    host = session.host()
    text = render.render_spec(host, kind)
    if not any(True for _ in render.guest_ready_groups(host)):
        note("no device is ready for a guest: bind one first, then generate again")
    click.echo(text, nl=False)
