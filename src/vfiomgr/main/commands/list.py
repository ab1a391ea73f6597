"""`vfiomgr list`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

import click

from vfiomgr.cli.listing import PLAIN_VIEW, View, print_names, view_options
from vfiomgr.cli.options import READING, flag, session_options
from vfiomgr.cli.output import note, or_dash, print_document, unknown_users
from vfiomgr.cli.table import Column, cut, wrapped
from vfiomgr.errors import UsageError
from vfiomgr.snapshot.filters import Filter, filter_options, group_cell, note_no_devices
from vfiomgr.snapshot.hardware import memory_of
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.units import counted

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.users.model import DeviceUser

_COLUMNS = (
    *(Column("ADDRESS"), cut("NAME"), Column("STATE"), Column("DRIVER"), Column("GROUP")),
    *(Column("NUMA"), Column("VRAM"), wrapped("USED BY"), wrapped("NOTES")),
    *(Column("ID"), Column("CLASS")),
)
_USUAL = tuple(column.heading for column in _COLUMNS[:8])
"""The columns that are shown; NOTES too, where there are notes."""
_UNKNOWN = "unknown"


@click.command("list")
@flag("--all", "every", text="All PCI devices, not only GPUs and accelerators.")
@flag("--vfs", text="List each virtual function (VF) on a line of its own.")
@flag("--persistent", text="List functions that are bound at each boot, or reserved.")
@filter_options
@view_options(_COLUMNS)
@session_options(*READING)
@pass_session
def list_devices(
    session: Session,
    *,
    every: bool,
    vfs: bool,
    persistent: bool,
    wanted: Filter,
    view: View,
) -> None:
    """List devices: GPUs and accelerators, or others by filter.

    A filter selects among all PCI devices; a device must match each option that is given.

    STATE is host (bound to a driver of the host), vfio (ready for a guest), in use (a guest has it
    open), vgpu (it has active vGPUs) or no driver. VRAM starts with <= where only an upper bound is
    known. USED BY names domains, pods and processes that have the device open.

    The VFs of a listed device are shown in its NOTES. JSON and YAML list each VF. "on demand" in
    NOTES: a ResourceClaim binds the device, by the layout of the node agent.

    With --persistent, the functions that are bound at each boot are listed: by `bind --persist`, by
    an installed layout and by driverctl. RESERVED is yes for cards of `bind --reserve`.

    \b
    Examples:
      vfiomgr list
      vfiomgr list --all --format json
      vfiomgr list --class nic --numa 0
      vfiomgr list --state vfio -o name
      vfiomgr list --columns address,driver,group --no-headers
      vfiomgr list --persistent
    """
    if persistent:
        if every or vfs or any(wanted) or view != PLAIN_VIEW:
            message = "--persistent takes no other option than --format"
            raise UsageError(message, "leave them out: vfiomgr list --persistent")
        from vfiomgr.passthrough.persist_commands import print_persisted  # noqa: PLC0415 - slow

        print_persisted(session)
    else:
        _list_devices(session, every=every, vfs=vfs, wanted=wanted, view=view)


def _list_devices(session: Session, *, every: bool, vfs: bool, wanted: Filter, view: View) -> None:
    is_table = session.format == "table"
    are_counted = is_table and not (vfs or view.names_only or any(wanted))
    host = session.scan_devices("table" if are_counted else None)
    devices = _selected(session, host, wanted, every=every)
    if are_counted and any(device.physical_function for device in _folded(devices)):
        host = session.scan_devices()
        devices = _selected(session, host, wanted, every=every)
    if (
        wanted.states
        or not is_table
        or view.needs("STATE", _USUAL)
        or view.needs("USED BY", _USUAL)
    ):
        host = session.with_holders(host, {n for d in devices for n in _nodes(host, d)})
    if wanted.states:
        devices = [device for device in devices if host.state_of(device) in wanted.states]
    if view.names_only:
        print_names([device.address for device in devices])
    elif not is_table:
        items = [_item(host, device) for device in devices]
        print_document("DeviceList", {"items": items}, session.format)
    elif devices:
        shown = devices if vfs else _folded(devices)
        _print_table(host, shown, view, is_live=session.is_live)
    elif any(wanted) and host.devices:
        note(wanted.nothing_found(host, f"the {counted(len(host.devices), 'PCI device')}"))
    elif host.devices:
        note(f"no GPUs or accelerators; --all lists {counted(len(host.devices), 'PCI device')}")
    else:
        note_no_devices(host)


def _selected(
    session: Session, host: HostSnapshot, wanted: Filter, *, every: bool
) -> list[PciDevice]:
    """The functions that are asked for."""
    selection = wanted.select(session, host)
    return [
        device
        for device in host.devices
        if (every or any(wanted) or device.is_graphics_or_accelerator)
        and selection.has_device(device)
    ]


def _folded(devices: Sequence[PciDevice]) -> list[PciDevice]:
    """Without the virtual functions of devices that are listed."""
    listed = {device.address for device in devices}
    return [device for device in devices if device.physical_function not in listed]


def _print_table(
    host: HostSnapshot, devices: Sequence[PciDevice], view: View, *, is_live: bool
) -> None:
    listed = {device.address for device in devices}
    rows = [_row(host, device, listed) for device in devices]
    has_notes = any(row[len(_USUAL)] for row in rows)
    usual = (*_USUAL, "NOTES") if has_notes else _USUAL
    view.print(_COLUMNS, rows, usual)
    if (
        host.users.processes is None
        and view.needs("USED BY", usual)
        and any(_UNKNOWN in row for row in rows)
    ):
        note(unknown_users("USED BY", is_live=is_live))


def _row(host: HostSnapshot, device: PciDevice, listed: Collection[PciAddress]) -> tuple[str, ...]:
    others = (host.device_named(str(a)) for a in device.virtual_functions if a not in listed)
    functions = (device, *filter(None, others))
    return (
        str(device.address),
        device.short_name,
        host.state_of(device).replace("-", " "),
        or_dash(device.driver),
        group_cell(host, device),
        or_dash(device.numa_node),
        or_dash(memory_of(host, device)),
        _used_by(host, functions),
        ", ".join(_notes(host, device, functions)),
        f"{device.vendor_id}:{device.device_id}",
        device.class_name,
    )


def _nodes(host: HostSnapshot, device: PciDevice) -> frozenset[str]:
    """The nodes of a function, and of the vGPUs on it."""
    vgpus = host.vgpus.of(str(device.address))
    own = host.guest_nodes(device).union(device.nodes)
    return own.union(*map(host.guest_nodes, vgpus))


def _used_by(host: HostSnapshot, functions: Sequence[PciDevice]) -> str:
    given = [f"pod {pod}" for function in functions for pod in _pods(host, function)]
    given += [f"claim {claim}" for claim in filter(None, map(host.claim_of, functions))]
    nodes = frozenset[str]().union(*(_nodes(host, function) for function in functions))
    users = host.users.of_nodes(nodes)
    if not (given or users or all(map(host.knows_users_of, functions))):
        return _UNKNOWN
    names = (
        f"pod {user.pod}" if user.pod else user.guest or f"{user.command} ({user.pid})"
        for user in users
    )
    return ", ".join(dict.fromkeys((*given, *names))) or "-"


def _pods(host: HostSnapshot, device: PciDevice) -> Iterator[str]:
    """The pods that have a function, or vGPUs on it."""
    vgpus = host.vgpus.of(str(device.address))
    found = (host.pod_of(device), *map(host.pod_of, vgpus))
    yield from dict.fromkeys(filter(None, found))


def _notes(host: HostSnapshot, device: PciDevice, functions: Sequence[PciDevice]) -> Iterator[str]:
    if device.is_boot_display:
        yield "console's display"
    if host.is_on_demand(device):
        yield "on demand"
    if device.virtual_functions:
        yield counted(len(device.virtual_functions), "VF")
    if device.physical_function:
        yield f"VF of {device.physical_function}"
    count = sum(len(host.vgpus.of(str(function.address))) for function in functions)
    if count:
        yield counted(count, "vGPU")
    if device.driver_override not in (None, device.driver):
        yield f"driver_override {device.driver_override}"
    origin = host.origin(device)
    if origin:
        yield f"original driver {origin.state.driver or 'none'}"
    if not device.is_responsive:
        yield "does not answer"
    if device.stuck:
        yield "stuck in the kernel"


def _item(host: HostSnapshot, device: PciDevice) -> dict[str, object]:
    """A function as documents have it: its facts, and what is concluded from them."""
    memory = memory_of(host, device)
    users = None if host.users.processes is None else host.users.of_nodes(_nodes(host, device))
    are_pods_known = all(each.kind != "pods" for each in host.unknown_users_of(device))
    return {
        **{name: getattr(device, name) for name in device.__struct_fields__},
        "short_name": device.short_name,
        "state": host.state_of(device),
        "vram_mib": memory and memory.mib,
        "is_vram_certain": memory and memory.is_certain,
        "pods": list(_pods(host, device)) or ([] if are_pods_known else None),
        "users": None if users is None else [_user(user) for user in users],
    }


def _user(user: DeviceUser) -> dict[str, object]:
    return {
        "pid": user.pid,
        "command": user.command,
        "unit": user.unit,
        "guest": user.guest,
        "pod": user.pod,
    }
