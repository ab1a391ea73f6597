"""`vfiomgr libvirt edit`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from vfiomgr.adapters.libvirt import render
from vfiomgr.adapters.libvirt.document import read_document
from vfiomgr.adapters.libvirt.edit import add_elements, remove_hostdevs, root_port
from vfiomgr.adapters.libvirt.read import domain_of
from vfiomgr.cli.change import tell_how_to_bind
from vfiomgr.cli.layout_files import STANDARD_INPUT, source_of
from vfiomgr.cli.libvirt_difference import Edited, print_difference, print_edited
from vfiomgr.cli.libvirt_elements import (
    device_api,
    is_uuid,
    require_manageable,
    slots_of,
    vgpu_named,
)
from vfiomgr.cli.session import Session, complete_address, session_options
from vfiomgr.errors import HostError, UsageError
from vfiomgr.host.rewrite import rewrite
from vfiomgr.model.pci import PciAddress
from vfiomgr.planner.domain_edit import Additions, plan_additions, plan_removals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.adapters.libvirt.document import Document
    from vfiomgr.model.domain import Domain
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.planner.domain_edit import Placed

_OWN_DIRECTORY = "/libvirt/qemu"
_DEVICE = "ADDRESS|UUID"


@click.command("edit")
@click.argument("file")
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
@click.option("--managed", is_flag=True, help="Let libvirt bind and unbind, instead of vfiomgr.")
@click.option("--only", is_flag=True, help="Leave the other functions of the slot as they are.")
@session_options()
@click.pass_obj
def edit(
    session: Session,
    *,
    file: str,
    added: tuple[str, ...],
    removed: tuple[str, ...],
    output: str | None,
    managed: bool,
    only: bool,
) -> None:
    """Put devices into the XML of a domain in FILE, or take them out; - reads from a pipe.

    Nothing else changes by a byte: comments, order, indentation, line ends and elements that
    vfiomgr does not know stay. Taking out what was put in gives back the file that was there.
    The functions of a slot come and go as one multifunction guest device, behind a root port that
    is free; where there is none, one is added, and goes with the device.

    \b
    Examples:
      vfiomgr libvirt edit guest.xml --add 0000:04:00.0
      vfiomgr libvirt edit guest.xml --add 0000:04:00.0 --dry-run    show the difference
      vfiomgr libvirt edit guest.xml --remove 0000:04:00.0 --output new.xml
      virsh dumpxml --inactive guest | vfiomgr libvirt edit - --add 04:00.0 > guest.xml
    """
    if not (added or removed):
        message = "nothing is asked for"
        raise UsageError(message, "name a device: --add 0000:04:00.0, or --remove 0000:04:00.0")
    host = _host(session, required=bool(added))
    done = _edited(_read(file), host, added, removed, managed=managed, only=only)
    if session.dry_run:
        print_difference(session, done)
    else:
        _write(file, output, done)
        target = _target(file, output)
        undo = f"vfiomgr libvirt edit {target}{' --only' if only else ''}"
        print_edited(session, done, is_piped=target == STANDARD_INPUT, undo=undo)
    if host is not None and not managed:
        names = [name for placed in done.additions.placed for name in placed.names]
        functions = [device for name in names if (device := host.device_named(name)) is not None]
        tell_how_to_bind(host, [d for d in functions if not host.is_ready_for_guests(d)])


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
    added: Sequence[str],
    removed: Sequence[str],
    *,
    managed: bool,
    only: bool,
) -> Edited:
    """The text without what goes, then with what comes."""
    domain = domain_of(document.root)
    removals = plan_removals(domain, _names(domain, removed), host, only=only)
    text = remove_hostdevs(document, removals.devices) if removals.devices else document.text
    if host is None or not added:
        return Edited(document, text, removals, Additions())
    left = read_document(text, document.source)
    devices = _devices(host, added, only=only)
    additions = plan_additions(domain_of(left.root), devices)
    elements = [e for one in additions.placed for e in _elements(host, one, managed=managed)]
    ports = [root_port(port.index, port.device) for port in additions.ports]
    return Edited(document, add_elements(left, elements, ports), removals, additions)


def _names(domain: Domain, texts: Sequence[str]) -> list[str]:
    """Devices of a domain as its file means them; the domain of an address may be left out."""
    known = [device.address for device in domain.hostdevs if device.address is not None]
    return [text.lower() if is_uuid(text) else str(PciAddress.parse(text, known)) for text in texts]


def _devices(host: HostSnapshot, texts: Sequence[str], *, only: bool) -> list[tuple[str, ...]]:
    """What becomes one device of the guest each, by name: slots first, then vGPUs."""
    slots = slots_of(host, [text for text in texts if not is_uuid(text)], only=only)
    vgpus = [vgpu_named(host, text).uuid or "" for text in texts if is_uuid(text)]
    found = [tuple(str(device.address) for device in slot) for slot in slots]
    return list(dict.fromkeys([*found, *((uuid,) for uuid in vgpus)]))


def _elements(host: HostSnapshot, placed: Placed, *, managed: bool) -> Iterator[str]:
    """The XML of a device at its place."""
    if is_uuid(placed.names[0]):
        vgpu = vgpu_named(host, placed.names[0])
        yield render.mdev_hostdev(vgpu, device_api(host, vgpu))
        return
    functions = [host.device(host.parse_address(name)) for name in placed.names]
    if managed:
        require_manageable(host, functions)
    guest = placed.guest
    bus, slot = (guest.bus, guest.slot) if guest is not None else (0, 0)
    yield from render.pci_hostdevs([functions], first_bus=bus, managed=managed, slot=slot)


def _read(path: str) -> Document:
    """The document of a file.

    Raises:
        UsageError: it cannot be read.
        InvalidDocument: it is no XML.

    """
    try:
        if path == STANDARD_INPUT:
            text = sys.stdin.buffer.read()
        else:
            with open(path, "rb") as file:
                text = file.read()
    except OSError as error:
        message = f"cannot read the domain {path}: {error.strerror}"
        remedy = "name a file that is there, or - for a pipe; virsh dumpxml --inactive makes one"
        raise UsageError(message, remedy) from None
    return read_document(text, source_of(path))


def _target(file: str, output: str | None) -> str:
    """Where the text goes; what was piped in is piped out."""
    return file if output is None else output


def _write(file: str, output: str | None, done: Edited) -> None:
    """Put the text where it is to go.

    Raises:
        UsageError: that is a file of libvirt's own.
        HostError: it cannot be written.

    """
    target = _target(file, output)
    if target == STANDARD_INPUT:
        click.echo(done.after, nl=False)
    elif output is not None:
        rewrite(target, None, done.after)
    elif done.is_changed:
        _refuse_own_file(file)
        rewrite(file, done.before.text, done.after)


def _refuse_own_file(path: str) -> None:
    """Leave the files alone that libvirtd keeps in memory, and writes when it likes.

    Raises:
        UsageError: it is one.

    """
    directory, name = os.path.split(os.path.realpath(path))
    if directory.endswith(_OWN_DIRECTORY):
        guest = name.removesuffix(".xml")
        message = f"{path} is libvirt's own: it does not read it again, and overwrites it"
        remedy = f"virsh dumpxml --inactive {guest} > {guest}.xml, edit that, virsh define it"
        raise UsageError(message, remedy)
