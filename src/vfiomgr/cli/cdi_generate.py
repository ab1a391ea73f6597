"""`vfiomgr cdi generate`."""

from __future__ import annotations

import json

import click

from vfiomgr.adapters.cdi import render
from vfiomgr.cli.output import note, print_yaml
from vfiomgr.cli.session import Session, session_options


@click.command("generate")
@click.option(
    "--kind",
    default=render.DEFAULT_KIND,
    show_default=True,
    metavar="VENDOR/CLASS",
    help="Kata wants the resource name of the kubelet plugin here.",
)
@session_options()
@click.pass_obj
def generate(session: Session, kind: str) -> None:
    """Print a CDI specification of what a guest can take, as JSON (or YAML, which CDI reads too).

    That is what is bound, and virtual functions that the vendor's own driver has made vGPUs.

    \b
    Examples:
      vfiomgr cdi generate > /etc/cdi/vfiomgr.json
      vfiomgr cdi generate --kind nvidia.com/pgpu
    """
    host = session.host()
    text = render.render_spec(host, kind)
    if not any(True for _ in render.guest_ready_groups(host)):
        note(
            "no device is ready for a guest: bind one first, or make a vGPU of a virtual function "
            "of the vendor's own interface, then generate again; "
            "container runtimes reject a specification without devices"
        )
    if session.format == "yaml":
        print_yaml(json.loads(text))
    else:
        click.echo(text, nl=False)
