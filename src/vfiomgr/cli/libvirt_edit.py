"""`vfiomgr libvirt edit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import click

from vfiomgr.adapters.libvirt import render
from vfiomgr.adapters.libvirt.document import read_document
from vfiomgr.adapters.libvirt.edit import add_elements, remove_hostdevs, root_port
from vfiomgr.adapters.libvirt.read import domain_of
from vfiomgr.cli.libvirt_connection import connect_option
from vfiomgr.cli.libvirt_difference import Edited, print_difference, print_edited
from vfiomgr.cli.libvirt_hostdev import (
    DeviceOptions,
    hand_over,
    of_device,
    refuse_to_hurt,
    tell_what_waits,
)
from vfiomgr.cli.libvirt_places import place_of
from vfiomgr.cli.libvirt_versions import libvirt_version as version_of_libvirt
from vfiomgr.cli.libvirt_versions import qemu_version, version_option
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.errors import HostError, UsageError
from vfiomgr.model.hostdev import DeviceWish
from vfiomgr.model.pci import PciAddress
from vfiomgr.planner.domain_edit import (
    Additions,
    plan_additions,
    plan_removals,
    refuse_contradictions,
)
from vfiomgr.planner.guards import refuse_if_any
from vfiomgr.planner.guest.hostdevs import check, hostdevs_of
from vfiomgr.planner.guest.spaces import space_objections
from vfiomgr.planner.guest.units import is_uuid, units_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.adapters.libvirt.document import Document
    from vfiomgr.model.domain import Domain
    from vfiomgr.model.hostdev import GuestHostdev
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.planner.guest.units import Unit

_DEVICE = "ADDRESS|UUID"


@click.command("edit")
@click.argument("target", metavar="FILE|DOMAIN")
@click.option(
    "--add",
    "added",
    multiple=True,
    metavar=_DEVICE,
    shell_complete=complete_address,
    help="Put this device in; may be given several times.",
)
@click.option(
    "--remove",
    "removed",
    multiple=True,
    metavar=_DEVICE,
    shell_complete=complete_address,
    help="Take this device out, before others are put in.",
)
@click.option(
    "--output", metavar="FILE", help="Write to this file instead, - to a pipe; FILE stays."
)
@of_device
@click.option("--only", is_flag=True, help="Leave the other functions of the slot as they are.")
@version_option
@connect_option
@session_options()
@click.pass_obj
def edit(
    session: Session,
    *,
    target: str,
    added: tuple[str, ...],
    removed: tuple[str, ...],
    output: str | None,
    only: bool,
    libvirt_version: str | None,
    uri: str,
    **options: Unpack[DeviceOptions],
) -> None:
    """Put devices into the XML of a domain, or take them out.

    A FILE is there, has a / or ends in .xml; - reads from a pipe. Any other name is that of a
    DOMAIN of libvirt's, whose definition is changed: a running guest has it when started anew.

    Nothing else changes by a byte: comments, order, indentation, line ends and elements that
    vfiomgr does not know stay. Taking out what was put in gives back the file that was there.
    The functions of a slot come and go as one multifunction guest device, behind a root port that
    is free; where there is none, one is added, and goes with the device.

    \b
    Examples:
      vfiomgr libvirt edit guest.xml --add 0000:04:00.0
      vfiomgr libvirt edit guest.xml --add 0000:04:00.0 --dry-run    # show the difference
      vfiomgr libvirt edit guest.xml --remove 0000:04:00.0 --output new.xml
      vfiomgr libvirt edit guest --add 0000:04:00.0                  # the definition of a domain
      vfiomgr libvirt edit guest --connect qemu:///session --add 04:00.0 --only
      vfiomgr libvirt edit guest.xml --add 04:00.0 --rom /var/lib/libvirt/gpu.rom --boot-order 1
      vfiomgr libvirt edit guest.xml --display --ramfb \\
        --add f715f63c-0d00-4007-9c5a-b07b0c6c05de
      vfiomgr libvirt edit guest.xml --add 05:00.0 --managed --unassigned
      vfiomgr libvirt edit gb200.xml --add 0009:01:00.0 --acpi-nodes 1-8 --iommufd \\
        --libvirt-version 12.1
      vfiomgr libvirt edit guest.xml --add 41:00.4 --managed --driver-model mlx5_vfio_pci \\
        --libvirt-version 10.0
      virsh dumpxml --inactive guest | vfiomgr libvirt edit - --add 04:00.0 > guest.xml
    """
    if not (added or removed):
        message = "nothing is asked for"
        raise UsageError(message, "name a device: --add 0000:04:00.0, or --remove 0000:04:00.0")
    host = _host(session, required=bool(added))
    wishes = [DeviceWish(name, hand_over(options), is_alone=only) for name in added]
    units = units_of(host, wishes) if host is not None else ()
    check(units, version_of_libvirt(session, libvirt_version), qemu_version(session))
    place = place_of(target, output, uri, is_change=not session.dry_run)
    done, hostdevs = _edited(place.read(), host, units, removed, only=only)
    if host is not None:
        refuse_to_hurt(lambda: session.host(with_users=True), hostdevs, host)
    if session.dry_run:
        print_difference(session, done)
    else:
        place.write(done.before.text, done.after)
        undo = f"vfiomgr libvirt edit {place.argument}{' --only' if only else ''}"
        print_edited(session, done, is_piped=place.is_pipe, undo=undo)
    if host is not None:
        tell_what_waits(lambda: host, hostdevs, host)


def _host(session: Session, *, required: bool) -> HostSnapshot | None:
    """The host; what only goes may be of one that is elsewhere."""
    try:
        return session.host()
    except (HostError, UsageError):
        if required or session.snapshot is not None:
            raise
        return None


def _edited(
    document: Document,
    host: HostSnapshot | None,
    units: Sequence[Unit],
    removed: Sequence[str],
    *,
    only: bool,
) -> tuple[Edited, tuple[GuestHostdev, ...]]:
    """The text without what goes, then with what comes; and what that is."""
    domain = domain_of(document.root)
    removals = plan_removals(domain, _names(domain, removed), host, only=only)
    text = remove_hostdevs(document, removals.devices) if removals.devices else document.text
    if not units:
        return Edited(document, text, removals, Additions()), ()
    left = read_document(text, document.source)
    by_names = {unit.function_names: unit for unit in units}
    staying = domain_of(left.root)
    refuse_contradictions(staying, ((unit.function_names[0], unit.hand_over) for unit in units))
    if host is not None:
        refuse_if_any(space_objections(host, staying, units), frozenset())
    is_unassigned = not any(unit.is_seen for unit in units)
    additions = plan_additions(staying, by_names, is_unassigned=is_unassigned)
    coming = [(by_names[one.names], one.guest) for one in additions.placed]
    hostdevs = tuple(h for unit, guest in coming for h in hostdevs_of(unit, guest))
    ports = [root_port(port.index, port.device) for port in additions.ports]
    after = add_elements(left, [render.hostdev(planned) for planned in hostdevs], ports)
    return Edited(document, after, removals, additions), hostdevs


def _names(domain: Domain, texts: Sequence[str]) -> list[str]:
    """Devices of a domain as its file means them; the domain of an address may be left out."""
    known = [device.address for device in domain.hostdevs if device.address is not None]
    return [text.lower() if is_uuid(text) else str(PciAddress.parse(text, known)) for text in texts]
