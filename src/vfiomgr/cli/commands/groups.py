"""`vfiomgr groups`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from vfiomgr.cli.options import READING, session_options
from vfiomgr.cli.output import note, note_no_devices, or_dash, print_document, print_table, say
from vfiomgr.cli.session import Session, pass_session
from vfiomgr.passthrough.guards import iommu_off
from vfiomgr.pci.iommu import acs_override_words, blockers

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from vfiomgr.pci.iommu import IommuGroup
    from vfiomgr.snapshot.model import HostSnapshot

_VIABLE = {"viable": "yes", "blocked": "no", "not-for-guests": "-"}
_GROUP_HEADINGS = ("GROUP", "VIABLE", "MEMBER", "NAME", "DRIVER", "WHY NOT")


@click.command("groups")
@session_options(*READING)
@pass_session
def groups(session: Session) -> None:
    """List IOMMU groups: which are viable (a guest could own them now), and what keeps the others.

    A group is viable when each of its members is on a VFIO driver, on no driver, or on one that
    does no DMA of its own (pcieport, pci-stub). A group that contains nothing a guest can use, such
    as PCIe ports only, is marked with - and is not viable.

    \b
    Examples:
      vfiomgr groups
      vfiomgr groups --format json
    """
    host = session.scan_devices()
    off = iommu_off(host) if host.devices and not host.iommu.is_on else None
    pretended = acs_override_words(host.kernel_command_line)
    documents = [_document(host, group) for group in host.groups]
    if session.format != "table":
        body = {
            "iommu": {
                "is_on": host.iommu.is_on if host.iommu.is_known else None,
                "finding": off.summary if off else None,
                "remedy": off.remedy if off else None,
                "acs_override": pretended,
            },
            "items": documents,
        }
        print_document("IommuGroupList", body, session.format)
        return
    if not host.devices:
        note_no_devices(host)
    if pretended:
        note(
            f"groups may be smaller than what the hardware isolates: {' '.join(pretended)} is on "
            "the kernel command line (see vfiomgr check)"
        )
    if off:
        say(off.summary, f"remedy: {off.remedy}")
    if host.groups:
        print_table(_GROUP_HEADINGS, [row for document in documents for row in _rows(document)])


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
        "obstacles": [f"{m['address']} is on {m['driver']}" for m in members if m["is_blocking"]],
        "node": group.node if group.has_node else None,
        "members": members,
    }


def _state(host: HostSnapshot, group: IommuGroup) -> str:
    """Whether a guest could own a group now: viable, blocked, or not-for-guests."""
    if not host.is_viable(group.number):
        return "blocked"
    functions = host.group_members(group.number)
    vgpus = (host.vgpu(name) for name in group.members)
    is_useful = any(not d.is_bridge for d in functions) or any(vgpus)
    return "viable" if is_useful else "not-for-guests"


def _member(host: HostSnapshot, name: str, blocking: Collection[str]) -> dict[str, Any]:
    device, vgpu = host.device_named(name), host.vgpu(name)
    title = f"vGPU {vgpu.type} of {vgpu.parent}" if vgpu else None
    driver = vgpu.driver if vgpu else None
    if device is not None:
        title, driver = device.name, device.driver
    return {"address": name, "name": title, "driver": driver, "is_blocking": name in blocking}


def _rows(document: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    number, viable = str(document["number"]), _VIABLE[document["state"]]
    for member in document["members"]:
        why_not = "on a host driver" if member["is_blocking"] else ""
        name, driver = or_dash(member["name"]), or_dash(member["driver"])
        yield (number, viable, member["address"], name, driver, why_not)
        number = viable = ""
