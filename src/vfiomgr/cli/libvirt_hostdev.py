"""`vfiomgr libvirt hostdev`."""

from __future__ import annotations

import click

from vfiomgr.adapters.libvirt import render
from vfiomgr.cli.change import tell_how_to_bind
from vfiomgr.cli.libvirt_elements import (
    device_api,
    is_uuid,
    require_manageable,
    slots_of,
    vgpu_named,
)
from vfiomgr.cli.output import print_document
from vfiomgr.cli.parameters import WholeNumber
from vfiomgr.cli.session import Session, complete_address, session_options


@click.command("hostdev")
@click.argument(
    "devices", nargs=-1, required=True, metavar="ADDRESS|UUID...", shell_complete=complete_address
)
@click.option(
    "--guest-bus",
    type=WholeNumber(1, render.LAST_GUEST_BUS),
    default=render.DEFAULT_GUEST_BUS,
    show_default=True,
    help="Index of the guest's root port for the first device of several functions.",
)
@click.option("--managed", is_flag=True, help="Let libvirt bind and unbind, instead of vfiomgr.")
@click.option("--only", is_flag=True, help="Leave the other functions of the slot out.")
@session_options()
@click.pass_obj
def hostdev(
    session: Session, *, devices: tuple[str, ...], guest_bus: int, managed: bool, only: bool
) -> None:
    """Print <hostdev> elements for PCI devices and vGPUs, to put into a domain's <devices>.

    The functions of a slot become one multifunction guest device.

    \b
    Examples:
      vfiomgr libvirt hostdev 0000:04:00.0
      vfiomgr libvirt hostdev f715f63c-0d00-4007-9c5a-b07b0c6c05de
    """
    host = session.host()
    vgpus = [vgpu_named(host, text) for text in devices if is_uuid(text)]
    slots = slots_of(host, [text for text in devices if not is_uuid(text)], only=only)
    functions = [device for slot in slots for device in slot]
    if managed:
        require_manageable(host, functions)
    elements = list(render.pci_hostdevs(slots, first_bus=guest_bus, managed=managed))
    elements += [render.mdev_hostdev(vgpu, device_api(host, vgpu)) for vgpu in vgpus]
    if session.format == "table":
        click.echo("".join(elements), nl=False)
    else:
        print_document("HostdevList", {"items": elements}, session.format)
    if not managed:
        tell_how_to_bind(host, [d for d in functions if not host.is_ready_for_guests(d)])
