"""`vfiomgr vgpu … --libvirt`: mediated devices that libvirt owns."""

from __future__ import annotations

import shlex
import uuid as uuids
from collections.abc import Callable
from typing import TYPE_CHECKING

from vfiomgr.cli.output import note, print_document, print_table, print_text, say
from vfiomgr.definitions.start import mdev_type, refuse_without_room
from vfiomgr.diagnostic import refuse
from vfiomgr.errors import LibvirtFailed, UnknownDevice, UsageError
from vfiomgr.libvirt.client.connection import Connection, NodeMdev, find_mdev, parent_name
from vfiomgr.libvirt.commands.connection import DEFAULT_URI, connected, require_running_host
from vfiomgr.libvirt.xml.render import node_mdev
from vfiomgr.snapshot.named import find_address

if TYPE_CHECKING:
    from vfiomgr.snapshot.session import Session


_EXAMPLE = "e.g. vfiomgr vgpu define --libvirt --parent 65:00.0 --type nvidia-468"
_HEADINGS = ("UUID", "PARENT", "TYPE", "ACTIVE", "DEFINED", "AUTOSTART")


def list_mdevs(session: Session, uri: str) -> None:
    """List mediated devices in libvirt, active and defined."""
    found = _mdevs(uri)
    if session.format != "table":
        items = [_item(mdev) for mdev in found]
        print_document("NodeMdevList", {"items": items}, session.format)
    elif found:
        print_table(_HEADINGS, [_row(mdev) for mdev in found])
    else:
        note(f"libvirt has no mediated devices ({uri})")


def _mdevs(uri: str) -> tuple[NodeMdev, ...]:
    """All mediated devices; a read-only connection does not report autostart."""
    try:
        with connected(uri) as connection:
            return connection.mdevs()
    except LibvirtFailed:
        with connected(uri, read_only=True) as connection:
            return connection.mdevs()


def _item(mdev: NodeMdev) -> dict[str, object]:
    return {
        "uuid": mdev.uuid,
        "name": mdev.name,
        "parent": mdev.parent,
        "type": mdev.type,
        "active": mdev.state.is_active,
        "defined": mdev.state.is_defined,
        "autostart": mdev.state.starts_by_itself,
    }


def _row(mdev: NodeMdev) -> tuple[str, ...]:
    state = mdev.state
    marks = (state.is_active, state.is_defined, state.starts_by_itself)
    words = {True: "yes", False: "no", None: "-"}
    return (mdev.uuid, mdev.parent, mdev.type, *(words[mark] for mark in marks))


def define_mdev(
    session: Session,
    uri: str,
    uuid: str | None,
    *,
    parent: str | None,
    wanted: str | None,
    autostart: bool,
) -> None:
    """Define a vGPU in libvirt without starting it; libvirt itself accepts any type."""
    if parent is None or wanted is None:
        message = f"missing option: {'--parent DEVICE' if parent is None else '--type TYPE'}"
        raise UsageError(message, _EXAMPLE)
    name = _uuid(uuid) if uuid is not None else str(uuids.uuid4())
    host = session.scan(with_gpu_modes=True)
    address = find_address(host, parent)
    type_id = mdev_type(host, address, wanted)
    element = node_mdev(name, parent_name(address), type_id)
    if session.dry_run:
        _print_call(session, "define", name, element)
        return
    require_running_host(session)
    with connected(uri) as connection:
        known = find_mdev(connection.mdevs(), name)
        if known is not None and known.state.is_defined:
            _refuse_another(known, str(address), type_id, uri)
            is_changed = bool(known.state.starts_by_itself) != autostart
            if is_changed:
                connection.set_mdev_autostart(known, autostart=autostart)
        else:
            connection.define_mdev(element, name, autostart=autostart)
            is_changed = True
    _tell(session, "defined", name, is_changed=is_changed)


def start_mdev(session: Session, uri: str, names: tuple[str, ...]) -> None:
    """Start a defined vGPU if its parent has capacity."""

    def look(_connection: Connection, mdev: NodeMdev) -> None:
        refuse_without_room(session.scan(with_gpu_modes=True), mdev.parent, mdev.type)

    _change(
        session,
        uri,
        names,
        "started",
        is_so=lambda mdev: mdev.state.is_active,
        look=look,
        act=lambda connection, mdev: connection.start_mdev(mdev),
    )


def stop_mdev(session: Session, uri: str, names: tuple[str, ...]) -> None:
    """Stop an active vGPU that no running domain uses; its definition stays."""
    _change(
        session,
        uri,
        names,
        "stopped",
        is_so=lambda mdev: not mdev.state.is_active,
        look=_refuse_used,
        act=lambda connection, mdev: connection.stop_mdev(mdev),
    )


def undefine_mdev(session: Session, uri: str, names: tuple[str, ...]) -> None:
    """Delete a vGPU definition; an active vGPU keeps running."""
    _change(
        session,
        uri,
        names,
        "undefined",
        is_so=lambda mdev: not mdev.state.is_defined,
        act=lambda connection, mdev: connection.undefine_mdev(mdev),
    )


def _change(
    session: Session,
    uri: str,
    names: tuple[str, ...],
    state: str,
    *,
    is_so: Callable[[NodeMdev], bool],
    act: Callable[[Connection, NodeMdev], None],
    look: Callable[[Connection, NodeMdev], None] | None = None,
) -> None:
    """Change the state of a mediated device if needed; `look` refuses harmful changes."""
    if len(names) > 1:
        message = "--libvirt takes one UUID"
        raise UsageError(message, "run the command for each vGPU")
    (uuid,) = names
    require_running_host(session)
    with connected(uri) as connection:
        mdev = find_mdev(connection.mdevs(), _uuid(uuid))
        if mdev is None:
            message = f"no such mediated device in libvirt: {uuid}"
            raise UnknownDevice(message, f"vfiomgr vgpu list{_at(uri)} shows the devices")
        is_changed = not is_so(mdev)
        if is_changed and look is not None:
            look(connection, mdev)
        if is_changed and not session.dry_run:
            act(connection, mdev)
    _tell(session, state, mdev.uuid, is_changed=is_changed)


def _at(uri: str) -> str:
    """The options that select the same libvirt in another command."""
    return " --libvirt" if uri == DEFAULT_URI else f" --connect {shlex.quote(uri)}"


def _uuid(text: str) -> str:
    try:
        return str(uuids.UUID(text))
    except ValueError:
        message = f"invalid UUID: {text!r}"
        raise UsageError(message, "write it like f715f63c-0d00-4007-9c5a-b07b0c6c05de") from None


def _refuse_another(known: NodeMdev, parent: str, type_id: str, uri: str) -> None:
    if (known.parent, known.type) != (parent, type_id):
        message = f"{known.uuid} is already defined as {known.type} on {known.parent}"
        remedy = f"vfiomgr vgpu undefine {known.uuid}{_at(uri)}, or choose another UUID"
        refuse("mdev-defined-otherwise", known.uuid, message, remedy)


def _refuse_used(connection: Connection, mdev: NodeMdev) -> None:
    """Refuse a device in use: removing it would wait for the guest (mdev_device_remove)."""
    for domain in connection.hypervisor().domains:
        if domain.running is not None and domain.running.hostdev(mdev.uuid) is not None:
            message = f"{mdev.uuid} is in use by the running domain {domain.name}"
            remedy = f"vfiomgr libvirt detach {domain.argument} {mdev.uuid} --live"
            refuse("held-by-domain", mdev.uuid, message, remedy)


def _print_call(session: Session, verb: str, uuid: str, element: str) -> None:
    if session.format != "table":
        print_document("NodeMdevPlan", {"uuid": uuid, "xml": element}, session.format)
        return
    say(f"plan: {verb} {uuid}", f"  virsh nodedev-{verb} /dev/stdin <<'END'")
    print_text(element)
    say("END")


def _tell(session: Session, state: str, uuid: str, *, is_changed: bool) -> None:
    if session.format != "table":
        body = {"uuid": uuid, "state": state, "changed": is_changed, "dry_run": session.dry_run}
        print_document("NodeMdevOutcome", body, session.format)
        return
    would = "would be " if session.dry_run and is_changed else ""
    say(f"{would}{state}: {uuid}" if is_changed else f"{uuid} is already {state}")
