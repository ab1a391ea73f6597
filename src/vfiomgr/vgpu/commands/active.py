"""The command `vfiomgr vgpu list`: active vGPUs, their users and their definitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.cli.output import note, or_dash, print_document, print_table, say, unknown_users
from vfiomgr.cli.table import cut, wrapped
from vfiomgr.vgpu.commands.quotas import quota_item
from vfiomgr.vgpu.model import Vgpu, describe_type
from vfiomgr.vgpu.quota.capacity import function_vgpus

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.session import Session
    from vfiomgr.users.model import DeviceUser

_HEADINGS = (
    *("VGPU", "PARENT", "TYPE", cut("NAME"), "GROUP", "DRIVER", "DEFINED", "MADE BY"),
    wrapped("USED BY"),
)
_LABELS = (
    *("parent", "type", "name", "IOMMU group", "driver", "defined", "made by", "in use by"),
    "VFIO node",
)
_UNSEEN = "unknown"


def list_active(session: Session) -> None:
    """List the active vGPUs."""
    host = session.scan()
    functions = function_vgpus(host)
    devices = tuple(filter(None, (_function(host, vgpu) for vgpu in functions)))
    host = session.with_vgpu_users(host, devices)
    vgpus = (*host.vgpus.active, *functions)
    if session.format != "table":
        items = [_item(host, vgpu) for vgpu in vgpus]
        print_document("VgpuList", {"items": items}, session.format)
    elif vgpus:
        print_table(_HEADINGS, [_row(host, vgpu) for vgpu in vgpus])
    else:
        note("no active vGPUs")
    if host.users.processes is None and vgpus:
        note(unknown_users("USED BY", is_live=session.is_live))


def show_active(session: Session, host: HostSnapshot, vgpu: Vgpu) -> None:
    """Print an active vGPU, with the columns of `vgpu list`."""
    if session.format != "table":
        print_document("VgpuList", {"items": [_item(host, vgpu)]}, session.format)
        return
    parent = host.device_named(vgpu.parent)
    nodes = sorted(host.guest_nodes(vgpu))
    _, _, *rest = _row(host, vgpu)
    cells = (or_dash(parent or vgpu.parent), *rest, or_dash(", ".join(nodes)))
    say(
        str(vgpu),
        *(f"  {label.ljust(11)}  {cell}" for label, cell in zip(_LABELS, cells, strict=True)),
    )


def users_of(host: HostSnapshot, vgpu: Vgpu) -> list[dict[str, object]] | None:
    """The processes that use a vGPU, without duplicates; None if unknown."""
    if host.users.processes is None:
        return None
    found = {user.pid: user for user in _holders(host, vgpu)}
    return [
        {"pid": user.pid, "command": user.command, "unit": user.unit, "guest": user.guest}
        for user in found.values()
    ]


def _used_by(host: HostSnapshot, vgpu: Vgpu) -> str:
    pod = host.pod_of(vgpu)
    users = [*map(str, _holders(host, vgpu))]
    if not (pod or users or host.knows_users_of(vgpu)):
        return _UNSEEN
    return or_dash(", ".join(dict.fromkeys((*((f"pod {pod}",) if pod else ()), *users))))


def _holders(host: HostSnapshot, vgpu: Vgpu) -> tuple[DeviceUser, ...]:
    return host.holders(_function(host, vgpu) or vgpu)


def _function(host: HostSnapshot, vgpu: Vgpu) -> PciDevice | None:
    """The virtual function, if it is itself the vGPU."""
    return host.device_named(vgpu.parent) if vgpu.family == "sriov-vf" else None


def _definitions(host: HostSnapshot, vgpu: Vgpu) -> Iterator[tuple[str, str, str]]:
    """The definitions of a vGPU: type, start and file."""
    for mdev in host.defined.vgpus:
        if (mdev.uuid, mdev.parent) == (vgpu.uuid, vgpu.parent):
            yield mdev.type_id, mdev.start, mdev.path
    for gpu in host.defined.gpus:
        for function in gpu.vgpus:
            if str(function.address) == vgpu.name:
                yield function.type_id, function.start, gpu.path


def _item(host: HostSnapshot, vgpu: Vgpu) -> dict[str, object]:
    facts = {name: getattr(vgpu, name) for name in vgpu.__struct_fields__}
    defined = next(_definitions(host, vgpu), None)
    return {
        "name": vgpu.name,
        **facts,
        "made_by_vfiomgr": host.vgpus.is_own(vgpu),
        "adopted_from": host.vgpus.adopted_from(vgpu),
        "definition": defined and dict(zip(("type", "start", "path"), defined, strict=True)),
        **_share(host, vgpu),
        "pod": host.pod_of(vgpu),
        "users": users_of(host, vgpu),
    }


def _share(host: HostSnapshot, vgpu: Vgpu) -> dict[str, object]:
    """The GPU and quotas of a virtual function that is itself a vGPU."""
    device = _function(host, vgpu)
    if device is None:
        return {}
    quotas = host.function_quotas(device)
    shown = None if quotas is None else quota_item(quotas, device.address)
    return {"gpu": device.physical_function, "quotas": shown}


def _creator(host: HostSnapshot, vgpu: Vgpu) -> str:
    if not host.vgpus.is_own(vgpu):
        return "-"
    creator = host.vgpus.adopted_from(vgpu)
    return {None: "vfiomgr", "unknown": "adopted"}.get(creator, f"adopted ({creator})")


def _row(host: HostSnapshot, vgpu: Vgpu) -> tuple[str, ...]:
    kind, start, _ = next(_definitions(host, vgpu), (None, None, None))
    return (
        vgpu.name,
        vgpu.parent,
        vgpu.type,
        or_dash(describe_type(vgpu.type, vgpu.type_name).model_name),
        or_dash(vgpu.iommu_group),
        or_dash(vgpu.driver),
        or_dash(start) if kind in (None, vgpu.type) else f"as {kind}",
        _creator(host, vgpu),
        _used_by(host, vgpu),
    )
