"""`vfiomgr vgpu list --types`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.cli.output import note, or_dash, print_document, print_table
from vfiomgr.cli.table import wrapped
from vfiomgr.snapshot.named import find_address
from vfiomgr.vgpu.capacity import Capacity, Gpu, gpus, lost_functions, rooms, totals
from vfiomgr.vgpu.functions import creation, without_functions
from vfiomgr.vgpu.placement import find_parents, no_gpus
from vfiomgr.vgpu.quota.capacity import function_rooms

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.session import Session

_TYPE_HEADINGS = (
    *("GPU", "TYPE", "NAME", "MEMORY", "HEADS", "AVAILABLE", "UNUSABLE"),
    wrapped("NOTES"),
)


def list_types(session: Session, parent: str | None) -> None:
    """List vGPU types and how many more fit on each GPU."""
    host = session.scan(with_gpu_modes=True)
    found, items = _rooms(host, parent)
    together = totals(room for _, room in items)
    if session.format != "table":
        body = {
            "items": [_type_item(gpu, room) for gpu, room in items],
            "totals": [_total_item(room) for room in together],
        }
        print_document("VgpuTypeList", body, session.format)
    elif items:
        rows = [_type_row(gpu.name, room) for gpu, room in items]
        rows += [_type_row("all", room) for room in together]
        print_table(_TYPE_HEADINGS, rows)
    elif found:
        note(f"no vGPU types available on: {', '.join(gpu.name for gpu in found)}")
    elif not without_functions(host):
        reason = no_gpus(host)
        note(reason.message)
        note(f"remedy: {reason.hint}")
    _tell_of_lost(host)
    _tell_of_idle(host)


def _rooms(
    host: HostSnapshot, parent: str | None
) -> tuple[tuple[Gpu, ...], list[tuple[Gpu, Capacity]]]:
    """The GPUs and their capacities, including GPUs whose virtual functions are vGPUs."""
    divided = function_rooms(host)
    if parent is not None:
        name = str(find_address(host, parent)) if ":" in parent else parent
        asked = [(gpu, one) for gpu, one in divided if gpu.name == name]
        if asked:
            return tuple(gpu for gpu, _ in asked), asked
        divided = ()
    found = gpus(host) if parent is None else tuple(find_parents(host, parent))
    items = [(gpu, one) for gpu in found for one in rooms(gpu)]
    return (*found, *(gpu for gpu, _ in divided)), [*items, *divided]


def _type_item(gpu: Gpu, room: Capacity) -> dict[str, object]:
    kind = room.type
    return {
        "gpu": gpu.name,
        "family": gpu.family,
        "id": kind.id,
        "name": kind.name,
        "series": kind.series,
        "framebuffer_mib": kind.framebuffer,
        "heads": kind.heads,
        "resolution": kind.resolution,
        "max_instances": kind.max_instances,
        "device_api": kind.device_api,
        "description": kind.description,
        "numa_node": gpu.numa_node,
        "active": sum(vgpu.type == kind.id for vgpu in gpu.instances),
        "available_instances": room.more,
        "available_in_new_gpu_instances": room.makeable,
        "is_certain": room.is_certain,
        "unavailable_because": room.unavailable_because,
        "stranded_mib": room.stranded,
    }


def _total_item(room: Capacity) -> dict[str, object]:
    return {
        "id": room.type.id,
        "name": room.type.name,
        "available_instances": room.more,
        "available_in_new_gpu_instances": room.makeable,
        "is_certain": room.is_certain,
    }


def _type_row(gpu: str, room: Capacity) -> tuple[str, ...]:
    kind = room.type
    return (
        gpu,
        kind.id,
        or_dash(kind.model_name),
        "-" if kind.framebuffer is None else f"{kind.framebuffer}M",
        or_dash(kind.heads),
        f"{'' if room.is_certain else '<='}{room.more}"
        + (f" +{room.makeable}" if room.makeable else ""),
        or_dash(room.stranded),
        or_dash(room.unavailable_because),
    )


def _tell_of_lost(host: HostSnapshot) -> None:
    """Report unusable virtual functions, and how to restore them."""
    wedged = {one.name: one.why for one in host.vgpus.wedged}
    for gpu in gpus(host):
        known = lost_functions(host, gpu.parents)
        reasons = {p.name: known.get(p.name) or wedged.get(p.name) for p in gpu.parents}
        told = [f"{name} {why}" for name, why in reasons.items() if why]
        if told:
            count = gpu.device.sriov_numvfs if gpu.device is not None else None
            note(
                f"unusable: {', '.join(told)}; to restore them, remove all vGPUs of {gpu.name}, "
                f"then: vfiomgr sriov set {gpu.name} 0; vfiomgr sriov set {gpu.name} {count}"
            )


def _tell_of_idle(host: HostSnapshot) -> None:
    """Report GPUs that need virtual functions before they offer vGPUs."""
    known = {gpu.name for gpu in gpus(host)}
    for device in without_functions(host):
        if str(device.address) in known:
            continue
        present, total = device.sriov_numvfs or 0, device.sriov_totalvfs
        has = (
            f"none of its {present} is on the driver {device.driver}; create them again"
            if present
            else f"has 0 of {total}; create them"
        )
        note(f"{device} needs virtual functions for vGPUs and {has}: {creation(host, device)}")
