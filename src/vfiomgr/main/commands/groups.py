"""`vfiomgr groups`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from vfiomgr.cli.listing import View, print_names, view_options
from vfiomgr.cli.options import READING, flag, session_options
from vfiomgr.cli.output import note, or_dash, print_document, say
from vfiomgr.cli.table import Column, cut
from vfiomgr.listing import first_of
from vfiomgr.passthrough.isolation import iommu_off, iommu_unread, reserved_region
from vfiomgr.pci.iommu import IommuGroup, acs_override_words, blockers
from vfiomgr.snapshot.filters import Filter, Selection, filter_options, note_no_devices
from vfiomgr.snapshot.session import Session, pass_session
from vfiomgr.units import counted

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.values import DeviceState

    Bound = Literal["yes", "partly", "no"]

_COLUMNS = (
    *(Column("GROUP"), Column("ISOLATED"), Column("BOUND"), Column("ADDRESS"), cut("NAME")),
    *(Column("DRIVER"), Column("BLOCKS")),
)
_MOST = 3
"""Groups with memory of the firmware that are explained."""
_USUAL = tuple(column.heading for column in _COLUMNS)


@click.command("groups")
@flag("--all", "every", text="Groups of PCIe ports and bridges too.")
@filter_options
@view_options(_COLUMNS)
@session_options(*READING)
@pass_session
def groups(session: Session, *, every: bool, wanted: Filter, view: View) -> None:
    """List IOMMU groups: isolated or not, bound, and what blocks.

    A group is assigned to one guest together. ISOLATED yes: the group has one device (bridges not
    counted). BOUND yes: all functions are on VFIO drivers; partly: some are. BLOCKS: functions on
    host drivers, which prevent a guest from opening the group. A filter selects the groups with a
    matching device. JSON and YAML also list groups of ports.

    \b
    Examples:
      vfiomgr groups
      vfiomgr groups 0000:08:00.0
      vfiomgr groups --class gpu --format json
    """
    host = session.scan_devices()
    selection = wanted.select(session, host)
    if "in-use" in wanted.states or "vfio" in wanted.states:
        nodes = {n for device in host.devices for n in host.guest_nodes(device)}
        host = session.with_holders(host, nodes)
    off = iommu_off(host) if host.devices and not host.iommu.is_on else None
    found = [group for group in host.groups if not any(wanted) or _fits(host, group, selection)]
    documents = [_document(host, group) for group in found]
    shown = [d for d in documents if every or any(wanted) or d["state"] != "not-for-guests"]
    if view.names_only:
        print_names([member["address"] for document in shown for member in document["members"]])
        return
    if session.format != "table":
        body = {"iommu": _iommu_document(host, off), "items": documents}
        print_document("IommuGroupList", body, session.format)
        return
    _tell_of_host(host, off)
    if shown:
        rows = [row for document in shown for row in _rows(document)]
        numbers = {document["number"] for document in shown}
        view.print(_COLUMNS, rows, _USUAL)
        _tell_of_regions(host, [group for group in found if group.number in numbers])
    elif host.groups and any(wanted):
        note(wanted.nothing_found(host, f"the {counted(len(host.groups), 'IOMMU group')}"))
    if len(shown) < len(documents):
        left = len(documents) - len(shown)
        note(f"not listed: {counted(left, 'group')} of PCIe ports and bridges (see --all)")


def _iommu_document(host: HostSnapshot, off: Diagnostic | None) -> dict[str, Any]:
    """Whether devices are isolated at all, as JSON has it."""
    return {
        "is_on": host.iommu.is_on if host.iommu.is_known else None,
        "finding": off.summary if off else None,
        "remedy": off.remedy if off else None,
        "acs_override": acs_override_words(host.kernel.command_line),
    }


def _tell_of_host(host: HostSnapshot, off: Diagnostic | None) -> None:
    """Say why there are no groups, or why they are not what they seem."""
    if not host.devices:
        note_no_devices(host)
    if pretended := acs_override_words(host.kernel.command_line):
        note(
            f"groups may be smaller than what the hardware isolates: {' '.join(pretended)} is on "
            "the kernel command line (see vfiomgr check)"
        )
    if off:
        unread = [f"unknown: {text}" for text in iommu_unread(host)]
        say(*(unread or (off.summary,)), f"remedy: {off.remedy}")


def _tell_of_regions(host: HostSnapshot, shown: Sequence[IommuGroup]) -> None:
    found = [each for group in shown for each in _reserved(host, group)]
    first, more = first_of(found, _MOST, "; see vfiomgr check")
    for each in (*(f"{one.summary}; remedy: {one.without('allow').hint}" for one in first), *more):
        note(each)


def _fits(host: HostSnapshot, group: IommuGroup, selection: Selection) -> bool:
    """Whether a member meets all criteria."""
    states = selection.wanted.states

    def has_state(state: DeviceState) -> bool:
        return not states or state in states

    devices = host.group_members(group.number)
    vgpus = filter(None, map(host.vgpus.named, group.members))
    return any(selection.has_device(d) and has_state(host.state_of(d)) for d in devices) or any(
        selection.has_vgpu(host, vgpu) and has_state("vgpu") for vgpu in vgpus
    )


def _document(host: HostSnapshot, group: IommuGroup) -> dict[str, Any]:
    """A group as JSON has it; the table shows the same."""
    blocking = {str(device.address) for device in blockers(host.group_members(group.number))}
    members = [_member(host, name, blocking) for name in group.members]
    state = _state(host, group)
    return {
        "number": group.number,
        "type": group.type,
        "is_noiommu": group.is_noiommu,
        "state": state,
        "is_viable": state == "viable",
        "is_isolated": _is_isolated(host, group),
        "bound": _is_bound(host, group),
        "obstacles": [
            *(f"{m['address']} is on {m['driver']}" for m in members if m["is_blocking"]),
            *(found.summary for found in _reserved(host, group)),
        ],
        "node": group.node if group.has_node else None,
        "members": members,
    }


def _state(host: HostSnapshot, group: IommuGroup) -> str:
    """Whether a guest could own a group now: viable, blocked, or not-for-guests."""
    is_refused = any(found.override is None for found in _reserved(host, group))
    if not host.is_viable(group.number) or is_refused:
        return "blocked"
    functions = host.group_members(group.number)
    vgpus = (host.vgpus.named(name) for name in group.members)
    is_useful = any(not d.is_bridge for d in functions) or any(vgpus)
    return "viable" if is_useful else "not-for-guests"


def _reserved(host: HostSnapshot, group: IommuGroup) -> Iterator[Diagnostic]:
    """Why the kernel assigns none of its functions, whatever driver they are on."""
    functions = [d for d in host.group_members(group.number) if not d.is_bridge]
    return reserved_region(host, functions[0]) if functions else iter(())


def _member(host: HostSnapshot, name: str, blocking: Collection[str]) -> dict[str, Any]:
    device, vgpu = host.device_named(name), host.vgpus.named(name)
    title = f"vGPU {vgpu.type} of {vgpu.parent}" if vgpu else None
    driver = vgpu.driver if vgpu else None
    if device is not None:
        title, driver = device.name, device.driver
    return {
        "address": name,
        "name": title,
        "driver": driver,
        "is_blocking": name in blocking,
        "short_name": device.short_name if device is not None else title,
    }


def _is_bound(host: HostSnapshot, group: IommuGroup) -> Bound | None:
    """Whether all that a guest can use of a group is ready for it; None where there is nothing."""
    functions = [d for d in host.group_members(group.number) if not d.is_bridge]
    ready = [host.vgpus.is_ready_for_guests(device) for device in functions]
    if not ready:
        return "yes" if any(host.vgpus.named(name) for name in group.members) else None
    return "yes" if all(ready) else "partly" if any(ready) else "no"


def _is_isolated(host: HostSnapshot, group: IommuGroup) -> bool | None:
    """Whether it has only what goes to a guest together; None where there is nothing for one."""
    functions = (d for d in host.group_members(group.number) if not d.is_bridge)
    units = {tuple(other.address for other in host.slot(d)) for d in functions}
    if not units and not any(host.vgpus.named(name) for name in group.members):
        return None
    return len(units) <= 1 and not group.is_noiommu


def _rows(document: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    isolated = {True: "yes", False: "no", None: "-"}[document["is_isolated"]]
    own = (str(document["number"]), isolated, or_dash(document["bound"]))
    for member in document["members"]:
        yield (
            *own,
            member["address"],
            or_dash(member["short_name"]),
            or_dash(member["driver"]),
            "yes" if member["is_blocking"] else "-",
        )
