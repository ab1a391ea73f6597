"""`vfiomgr groups`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.output import NO_DEVICES, note, or_dash, print_document, print_table
from vfiomgr.cli.session import Session, session_options
from vfiomgr.model.iommu import blockers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.model.iommu import IommuGroup
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.planner.guards import Objection

_HEADINGS = ("GROUP", "VIABLE", "MEMBER", "NAME", "DRIVER", "WHY NOT")


@click.command("groups")
@session_options()
@click.pass_obj
def groups(session: Session) -> None:
    """List IOMMU groups: which are viable (a guest could own them now), and what keeps the others.

    A group whose members are on host drivers becomes viable when they are bound; one of bridges
    alone (-) holds nothing for a guest.

    \b
    Examples:
      vfiomgr groups
      vfiomgr groups --format json
    """
    host = session.devices()
    off = _iommu_off(host) if host.devices and not host.iommu.is_on else None
    if session.format != "table":
        body = {
            "iommu": {
                "is_on": host.iommu.is_on,
                "finding": off.reason if off else None,
                "remedy": off.remedy if off else None,
            },
            "items": [_document(host, group) for group in host.groups],
        }
        print_document("IommuGroupList", body, session.format)
        return
    if not host.devices:
        note(NO_DEVICES)
    if off:
        click.echo(f"{off.reason}\nremedy: {off.remedy}")
    if host.groups:
        rows = [row for group in host.groups for row in _rows(host, group)]
        print_table(_HEADINGS, rows)


def _iommu_off(host: HostSnapshot) -> Objection | None:
    from vfiomgr.planner.guards import iommu_off  # noqa: PLC0415 - most hosts have an IOMMU

    return iommu_off(host)


def _obstacles(host: HostSnapshot, group: IommuGroup) -> dict[str, str]:
    """Why the group is not viable, by the address of the member that is in the way."""
    members = host.group_members(group.number)
    return {str(d.address): f"{d.address} is on {d.driver}" for d in blockers(members)}


def _document(host: HostSnapshot, group: IommuGroup) -> dict[str, object]:
    obstacles = _obstacles(host, group)
    return {
        "number": group.number,
        "type": group.type,
        "is_noiommu": group.is_noiommu,
        "is_viable": not obstacles,
        "obstacles": list(obstacles.values()),
        "node": group.node if group.has_node else None,
        "members": [_member(host, name) for name in group.members],
    }


def _member(host: HostSnapshot, name: str) -> dict[str, object]:
    device = host.device_named(name)
    if device is not None:
        return {"address": name, "name": device.name, "driver": device.driver}
    vgpu = host.vgpu(name)
    return {
        "address": name,
        "name": f"vGPU {vgpu.type} of {vgpu.parent}" if vgpu else None,
        "driver": vgpu.driver if vgpu else None,
    }


def _viable(host: HostSnapshot, group: IommuGroup) -> str:
    """A dash for groups that hold nothing for a guest."""
    if not host.is_viable(group.number):
        return "no"
    members = host.group_members(group.number)
    return "-" if members and all(device.is_bridge for device in members) else "yes"


def _rows(host: HostSnapshot, group: IommuGroup) -> Iterator[tuple[str, ...]]:
    obstacles = _obstacles(host, group)
    number, viable = str(group.number), _viable(host, group)
    for name in group.members:
        member = _member(host, name)
        driver = or_dash(member["driver"])
        why_not = "on a host driver" if name in obstacles else ""
        yield (number, viable, name, or_dash(member["name"]), driver, why_not)
        number = viable = ""
