"""Plans to create and remove vGPUs, and the changes of GPU instances (MIG) that plans need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Option, Remedy, refuse, refuse_if_any
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import Plan, Step
from vfiomgr.engine.registry import device_notes, plans, resolves
from vfiomgr.errors import UnknownDevice
from vfiomgr.passthrough import guards
from vfiomgr.paths import MDEV_DEVICES, PCI_DEVICES
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.snapshot.named import find_address, find_device
from vfiomgr.vgpu.capacity import gpus
from vfiomgr.vgpu.instance_plan import instance_notes, needed_instances, vgpu_made_by
from vfiomgr.vgpu.model import MARKS, Vgpu, mark_file, mark_of, types_called
from vfiomgr.vgpu.placement import Placement, Placements, choose, find_parents
from vfiomgr.vgpu.quota.capacity import refuse_function
from vfiomgr.vgpu.steps import (
    CreateCheckpoint,
    CreateMdev,
    CreateVgpu,
    RemoveMdev,
    RemoveVgpu,
    SetVgpuAttribute,
    SetVgpuType,
)

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot


@plans(CreateVgpu)
def plan_create(
    host: HostSnapshot, request: CreateVgpu, checkpoint: CreateCheckpoint | None = None
) -> Plan:
    """Create vGPUs, all or none.

    Raises:
        UnknownDevice: the parent or a matching type is not found.
        Refusal: there is no room, or another vGPU has the UUID.
    """
    parent = request.parent
    if parent is not None and ":" in parent:
        parent = str(find_address(host, parent))
    refuse_function(host, parent, count=len(request.uuids))
    there = _there_already(host, request, checkpoint)
    missing = [number for number in range(len(request.uuids)) if number not in there]
    already = tuple(f"{there[number]} already exists" for number in sorted(there))
    # With a checkpoint, this run finishes another, which created the existing vGPUs.
    unmarked = [v for v in there.values() if checkpoint is not None and not host.vgpus.is_own(v)]
    wanted = replace(request, uuids=tuple(request.uuids[number] for number in missing))
    choice = Placements((), ())
    if missing and checkpoint is None:
        choice = choose(host, wanted)
    elif missing and checkpoint is not None:
        choice = _chosen_before(host, checkpoint, missing)
    pairs = zip(choice.places, wanted.uuids, strict=True)
    steps = [_creation(host, place, uuid) for place, uuid in pairs]
    made = list(filter(None, map(vgpu_made_by, steps)))
    instances = needed_instances(host, steps)
    left = {mark.path: mark.text for mark in host.vgpus.marks}  # of earlier vGPUs of a name
    marks = [
        ReplaceFile(file, left.get(file), mark_of(vgpu))
        for vgpu in (*unmarked, *made)
        for file in [mark_file(vgpu)]
    ]
    locks = {name for place in choice.places for name in _gpu_locks(host, place)}
    locks |= {name for vgpu in there.values() for name in _locks(host, vgpu)}
    return Plan(
        _summary(request, choice.places),
        (*instances, *steps, *marks),
        locks=tuple(sorted({*locks, *(f"vgpu-{vgpu.name}" for vgpu in made)})),
        notes=(*choice.notes, *instance_notes(instances)),
        already=already,
        resolves=(*(vgpu.name for vgpu in made), *(vgpu.name for vgpu in there.values())),
    )


@resolves(CreateVgpu)
def resolve(
    host: HostSnapshot, request: CreateVgpu, checkpoint: CreateCheckpoint | None = None
) -> CreateCheckpoint:
    """Return the selected placements."""
    if checkpoint is not None:
        return checkpoint
    there = _there_already(host, request, None)
    missing = [number for number in range(len(request.uuids)) if number not in there]
    wanted = replace(request, uuids=tuple(request.uuids[number] for number in missing))
    chosen = iter(choose(host, wanted).places if missing else ())
    places: list[tuple[str, str]] = []
    for number in range(len(request.uuids)):
        if (vgpu := there.get(number)) is not None:
            places.append((vgpu.parent, vgpu.type))
        else:
            place = next(chosen)
            places.append((place.parent.name, place.type.id))
    return CreateCheckpoint(tuple(places))


@plans(RemoveVgpu)
def plan_remove(host: HostSnapshot, request: RemoveVgpu) -> Plan:
    """Remove vGPUs; vGPUs that do not exist are ignored.

    Raises:
        Refusal: a guest uses one of them.
        UnknownDevice: a name cannot be that of a vGPU.
    """
    for name in request.names:
        refuse_function(host, name)
    found, already = _named(host, request)
    diagnostics = [o for vgpu in found for o in guards.assigned(host, vgpu)]
    refuse_if_any(diagnostics, request.allow)
    names = [vgpu.name for vgpu in found]
    locks = {name for vgpu in found for name in _locks(host, vgpu)}
    locks |= {f"vgpu-{name}" for name in request.names}
    left = _left_marks(host, [name for name in request.names if name not in names])
    locks |= {parent_lock(host, parent) for parent in left.values()}
    files = {*map(mark_file, found), *(MARKS / name for name in left)}
    return Plan(
        summary=_removal_summary(request, names),
        steps=(
            *(step for vgpu in found for step in _remembered(host, vgpu)),
            *(_removal(host, vgpu) for vgpu in found),
            *(ReplaceFile(m.path, m.text, None) for m in host.vgpus.marks if m.path in files),
        ),
        locks=tuple(sorted(locks)),
        notes=(*_foreign_notes(host, request), *device_notes(host, found)),
        already=already,
        resolves=(*names, *(name for name in request.names if name not in names)),
    )


def _there_already(
    host: HostSnapshot, request: CreateVgpu, checkpoint: CreateCheckpoint | None
) -> dict[int, Vgpu]:
    """The requested vGPUs that already exist, from an earlier or interrupted run.

    Raises:
        Refusal: a vGPU of another type or parent has the UUID.
    """
    found: dict[int, Vgpu] = {}
    for number, uuid in enumerate(request.uuids):
        vgpu = host.vgpus.named(uuid)
        place = None if checkpoint is None else checkpoint.places[number]
        if vgpu is not None:
            if not _is_as_asked(host, vgpu, request, place):
                message = f"{vgpu} already exists with type {vgpu.type} on {vgpu.parent}"
                fresh = Option("not-uuid", "leave out the UUID")
                then = " to use a random one, or remove that vGPU first"
                refuse("vgpu-exists", vgpu, message, Remedy("", fresh, then))
            found[number] = vgpu
        elif place is not None:
            parent, type_id = place
            other = host.vgpus.named(parent)
            if other is not None and other.type == type_id:
                found[number] = other
    return found


def _is_as_asked(
    host: HostSnapshot, vgpu: Vgpu, request: CreateVgpu, place: tuple[str, str] | None
) -> bool:
    if place is not None:
        return place == (vgpu.parent, vgpu.type)
    gpu = next((g for g in gpus(host) if vgpu in g.instances), None)
    kind = gpu.type_of(vgpu) if gpu else None
    if request.parent is not None:
        places = {p.name for g in find_parents(host, request.parent) for p in g.parents}
        if vgpu.parent not in places:
            return False
    if request.type is None:
        return True
    if gpu is None or kind is None:
        return vgpu.type == request.type
    return kind in types_called(gpu.types, request.type)


def _chosen_before(
    host: HostSnapshot, checkpoint: CreateCheckpoint, missing: Sequence[int]
) -> Placements:
    places: list[Placement] = []
    for number in missing:
        name, type_id = checkpoint.places[number]
        gpu = find_parents(host, name)[0]
        parent = next(parent for parent in gpu.parents if parent.name == name)
        kind = next((kind for kind in gpu.types if kind.id == type_id), None)
        if kind is None or parent not in gpu.free:
            message = f"{name} no longer offers type {type_id}"
            refuse(
                "vgpu-type-unavailable",
                name,
                message,
                "undo the interrupted operation: vfiomgr recover --undo",
            )
        places.append(Placement(gpu, parent, kind))
    return Placements(tuple(places), ())


def _creation(host: HostSnapshot, place: Placement, uuid: str) -> Step:
    parent, kind = place.parent, place.type
    if parent.family == "mdev":
        return CreateMdev(parent.name, parent.path, kind.id, uuid.lower())
    device = find_device(host, parent.name)
    return SetVgpuType(device.identity, before=0, after=int(kind.id))


def _removal(host: HostSnapshot, vgpu: Vgpu) -> Step:
    if vgpu.uuid is not None:
        paths = {parent.name: parent.path for parent in host.vgpus.parents}
        return RemoveMdev(vgpu.parent, paths[vgpu.parent], vgpu.type, vgpu.uuid)
    device = find_device(host, vgpu.parent)
    return SetVgpuType(device.identity, before=int(vgpu.type), after=0)


def _remembered(host: HostSnapshot, vgpu: Vgpu) -> Iterator[SetVgpuAttribute]:
    """The attributes that a rollback restores if it creates the vGPU again."""
    directory = (MDEV_DEVICES if vgpu.uuid is not None else PCI_DEVICES) / vgpu.name
    for name, text in host.defined.attributes_of(vgpu.name):
        if text.strip():
            yield SetVgpuAttribute(vgpu.name, directory, name, before=text, after=text)


def _left_marks(host: HostSnapshot, names: Iterable[str]) -> dict[str, str]:
    """The parents of removed vGPUs whose marks an interrupted run left behind, by name."""
    marks = {mark.path: mark.text for mark in host.vgpus.marks}
    parents = {name: marks.get(MARKS / name, "").split(" ")[0] for name in names}
    functions = {name: name for name in names if host.device_named(name) is not None}
    return {name: parent for name, parent in parents.items() if parent} | functions


def _named(host: HostSnapshot, request: RemoveVgpu) -> tuple[list[Vgpu], tuple[str, ...]]:
    """Return the named vGPUs, and notes for those that do not exist."""
    if request.every:
        own = [vgpu for vgpu in _below(host, request.parent) if host.vgpus.is_own(vgpu)]
        return own, () if own else ("no vGPU was created by vfiomgr",)
    found: list[Vgpu] = []
    absent: list[str] = []
    for name in request.names:
        vgpu = host.vgpus.named(name)
        if vgpu is None:
            _require_no_parent(host, name)
            absent.append(f"vGPU not found: {name}")
        else:
            found.append(vgpu)
    return found, tuple(absent)


def _require_no_parent(host: HostSnapshot, name: str) -> None:
    """Refuse the name of a GPU or parent whose vGPUs have other names.

    Raises:
        UnknownDevice: it has such vGPUs.
    """
    carried = [v.name for gpu in gpus(host) for v in gpu.instances if name in (gpu.name, v.parent)]
    if carried:
        message = f"{name} is not a vGPU; its vGPUs: {', '.join(carried)}"
        remedy = f"name them: vfiomgr vgpu remove {' '.join(carried)}; or remove those created by "
        raise UnknownDevice(message, f"{remedy}vfiomgr: vfiomgr vgpu remove --all --parent {name}")


def _below(host: HostSnapshot, parent: str | None) -> list[Vgpu]:
    """The vGPUs of a device; all vGPUs if it is None."""
    if parent is None:
        return list(host.vgpus.active)
    try:
        asked = find_parents(host, parent)
    except UnknownDevice:
        if host.device_named(parent) is None:
            raise
        return []
    return [v for gpu in asked for v in gpu.instances if gpu.asked in (None, v.parent)]


def _foreign_notes(host: HostSnapshot, request: RemoveVgpu) -> Iterator[str]:
    if request.every:
        for vgpu in _below(host, request.parent):
            if not host.vgpus.is_own(vgpu):
                yield f"keeping {vgpu} on {vgpu.parent}: not created by vfiomgr"


def _summary(request: CreateVgpu, places: Sequence[Placement]) -> str:
    kinds = dict.fromkeys(str(place.type) for place in places)
    on = dict.fromkeys(place.gpu.name for place in places)
    if len(places) == 1 and places[0].parent.family == "mdev":
        what = f"vGPU {request.uuids[-1].lower()}"
    else:
        what = f"{len(places) or len(request.uuids)} vGPUs" if len(places) != 1 else "a vGPU"
    if not places:
        return f"create {what}"
    return f"create {what} of type {' and '.join(kinds)} on {', '.join(on)}"


def _removal_summary(request: RemoveVgpu, names: Sequence[str]) -> str:
    if names or request.names:
        return f"remove vGPU {', '.join(names or request.names)}"
    return "remove all vGPUs created by vfiomgr"


def _gpu_locks(host: HostSnapshot, place: Placement) -> Iterator[str]:
    """The locks of the GPU, whose memory all vGPUs share, and of its free virtual functions."""
    if place.gpu.device is None:
        yield f"parent-{place.gpu.name}"
    else:
        yield device_lock(place.gpu.device)
    for parent in place.gpu.free:
        device = host.device_named(parent.name)
        if device is not None:
            yield device_lock(device)


def _locks(host: HostSnapshot, vgpu: Vgpu) -> Iterator[str]:
    """The locks of the parent, and of the name, which may be requested on two parents."""
    yield f"vgpu-{vgpu.name}"
    yield parent_lock(host, vgpu.parent)


def parent_lock(host: HostSnapshot, parent: str) -> str:
    """The lock of a parent, which an interrupted run may have held for a removed vGPU."""
    device = host.device_named(parent)
    return f"parent-{parent}" if device is None else device_lock(device)
