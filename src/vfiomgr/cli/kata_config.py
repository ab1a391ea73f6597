"""`vfiomgr kata config`."""

from __future__ import annotations

import click

from vfiomgr.adapters.kata import render
from vfiomgr.cli.output import note, print_document
from vfiomgr.cli.readying import tell_how_to_bind
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.planner.guards import bridge, refuse_if_any


@click.command("config")
@click.argument("addresses", nargs=-1, shell_complete=complete_address)
@session_options()
@click.pass_obj
def config(session: Session, addresses: tuple[str, ...]) -> None:
    """Print a configuration drop-in for ADDRESSES, or for all that a guest can take.

    That is what is bound, and virtual functions that the vendor's own driver has made vGPUs.

    \b
    Examples:
      vfiomgr kata config
      vfiomgr kata config 0000:04:00.0
    """
    host = session.host()
    named = [host.device(host.parse_address(text)) for text in addresses]
    refuse_if_any([o for device in named for o in bridge(host, device)], frozenset())
    functions = {d.address: d for device in named for d in host.slot(device)}
    bound = {d.address: d for d in host.devices if host.is_ready_for_guests(d)}
    text = render.render_drop_in(list((functions if addresses else bound).values()))
    if session.format == "table":
        click.echo(text, nl=False)
    else:
        body = {"path": render.DROP_IN, "text": text}
        print_document("KataConfiguration", body, session.format)
    if not addresses and not bound:
        note("nothing is bound yet: vfiomgr bind ADDRESS; or vfiomgr vgpu create")
    tell_how_to_bind(host, [d for d in functions.values() if d.address not in bound])
    if any(vgpu.uuid is not None for vgpu in host.vgpus):
        note(
            "vGPUs that are mediated devices are left out: Kata cannot attach them; "
            "libvirt can, with vfiomgr libvirt hostdev UUID"
        )
