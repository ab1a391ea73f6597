"""vGPU instances: create and remove."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Option, Remedy, blocker, refusal, refuse_if_any
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.registry import device_notes, plans, resolves
from vfiomgr.errors import UnknownDevice
from vfiomgr.passthrough import guards
from vfiomgr.paths import MDEV_DEVICES, PCI_DEVICES
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.vgpu import gpu_instances
from vfiomgr.vgpu.capacity import gpus
from vfiomgr.vgpu.model import MARKS, Vgpu, mark_file, mark_of, types_called
from vfiomgr.vgpu.placement import Placement, Placements, choose, find_parents
from vfiomgr.vgpu.quota.capacity import refuse_function
from vfiomgr.vgpu.requests import CreateCheckpoint, CreateVgpu, RemoveVgpu
from vfiomgr.vgpu.steps import CreateMdev, RemoveMdev, SetVgpuAttribute, SetVgpuType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from collections.abc import Set as AbstractSet

    from vfiomgr.engine.step import Step
    from vfiomgr.paths import HostPath
    from vfiomgr.snapshot.model import HostSnapshot


@plans(CreateVgpu)
def plan_create(
    host: HostSnapshot, request: CreateVgpu, checkpoint: CreateCheckpoint | None = None
) -> Plan:
    """Make instances, all or none, where there is room for them.

    Raises:
        UnknownDevice: no such parent, or no type that serves.
        Refusal: there is no room, or a UUID is taken by another vGPU.

    """
    refuse_function(host, _address_of(host, request.parent), count=len(request.uuids))
    there = _there_already(host, request, checkpoint)
    missing = [number for number in range(len(request.uuids)) if number not in there]
    already = tuple(f"{there[number]} exists already" for number in sorted(there))
    # With a checkpoint, this run finishes another: what is there was made by that one.
    unmarked = [v for v in there.values() if checkpoint is not None and not host.is_own(v)]
    wanted = replace(request, uuids=tuple(request.uuids[number] for number in missing))
    choice = Placements((), ())
    if missing:
        choice = (
            choose(host, wanted)
            if checkpoint is None
            else _chosen_before(host, checkpoint, missing)
        )
    steps: list[Step] = []
    made: list[Vgpu] = []
    for place, uuid in zip(choice.places, wanted.uuids, strict=True):
        step, vgpu = _creation(host, place, uuid)
        steps.append(step)
        made.append(vgpu)
    instances = gpu_instances.needed(host, steps)
    marks = [ReplaceFile(mark_file(v), None, mark_of(v)) for v in (*unmarked, *made)]
    locks = {name for place in choice.places for name in _gpu_locks(host, place)}
    locks |= {name for vgpu in there.values() for name in _locks(host, vgpu)}
    return Plan(
        _summary(request, choice.places),
        (*instances, *steps, *(_fresh(host, mark) for mark in marks)),
        locks=tuple(sorted({*locks, *(f"vgpu-{vgpu.name}" for vgpu in made)})),
        notes=(*choice.notes, *gpu_instances.notes(instances)),
        already=already,
        resolves=(*(vgpu.name for vgpu in made), *(vgpu.name for vgpu in there.values())),
    )


def _address_of(host: HostSnapshot, name: str | None) -> str | None:
    """The name of a device as sysfs has it, where it is an address."""
    if name is None or ":" not in name:
        return name
    return str(host.parse_address(name))


@resolves(CreateVgpu)
def resolve(
    host: HostSnapshot, request: CreateVgpu, checkpoint: CreateCheckpoint | None = None
) -> CreateCheckpoint:
    """Find the places that are chosen."""
    if checkpoint is not None:
        return checkpoint
    there = _there_already(host, request, None)
    missing = [number for number in range(len(request.uuids)) if number not in there]
    wanted = replace(request, uuids=tuple(request.uuids[number] for number in missing))
    chosen = iter(choose(host, wanted).places if missing else ())
    places: list[tuple[str, str]] = []
    for number in range(len(request.uuids)):
        if number in there:
            places.append((there[number].parent, there[number].type))
        else:
            place = next(chosen)
            places.append((place.parent.name, place.type.id))
    return CreateCheckpoint(tuple(places))


@plans(RemoveVgpu)
def plan_remove(host: HostSnapshot, request: RemoveVgpu) -> Plan:
    """Remove instances; one that is gone already is no error.

    Raises:
        Refusal: a guest holds one of them.
        UnknownDevice: a name is neither a vGPU's nor could be one's.

    """
    for name in request.names:
        refuse_function(host, name)
    found, already = _named(host, request)
    diagnostics = [o for vgpu in found for o in guards.held_by_guest(host, vgpu)]
    refuse_if_any(diagnostics, request.allow)
    names = [vgpu.name for vgpu in found]
    locks = {name for vgpu in found for name in _locks(host, vgpu)}
    locks |= {f"vgpu-{name}" for name in request.names}
    left = _left_marks(host, [name for name in request.names if name not in names])
    locks |= {_parent_lock(host, parent) for parent in left.values()}
    return Plan(
        summary=_removal_summary(request, names),
        steps=(
            *(step for vgpu in found for step in _remembered(host, vgpu)),
            *(_removal(host, vgpu) for vgpu in found),
            *_unmarkings(host, {*map(mark_file, found), *(MARKS / name for name in left)}),
        ),
        locks=tuple(sorted(locks)),
        notes=(*_foreign_notes(host, request), *device_notes(host, found)),
        already=already,
        resolves=(*names, *(name for name in request.names if name not in names)),
    )


def _there_already(
    host: HostSnapshot, request: CreateVgpu, checkpoint: CreateCheckpoint | None
) -> dict[int, Vgpu]:
    """The instances that a second run, or one that finishes another, finds made.

    Raises:
        Refusal: a UUID belongs to a vGPU of another kind.

    """
    found: dict[int, Vgpu] = {}
    for number, uuid in enumerate(request.uuids):
        vgpu = host.vgpu(uuid)
        place = None if checkpoint is None else checkpoint.places[number]
        if vgpu is not None:
            if not _is_as_asked(host, vgpu, request, place):
                message = f"{vgpu} exists: a {vgpu.type} on {vgpu.parent}"
                fresh = Option("not-uuid", "leave out the UUID")
                then = " to get a fresh one, or remove that one first"
                raise refusal([blocker("vgpu-exists", vgpu, message, Remedy("", fresh, then))])
            found[number] = vgpu
        elif place is not None:
            parent, type_id = place
            other = host.vgpu(parent)
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
            message = f"{name} makes no {type_id} any more"
            raise refusal(
                [
                    blocker(
                        "vgpu-type-unavailable",
                        name,
                        message,
                        "vfiomgr recover --undo takes back what was begun",
                    )
                ]
            )
        places.append(Placement(gpu, parent, kind))
    return Placements(tuple(places), ())


def _creation(host: HostSnapshot, place: Placement, uuid: str) -> tuple[Step, Vgpu]:
    parent, kind = place.parent, place.type
    is_mdev = parent.family == "mdev"
    name = uuid.lower() if is_mdev else None
    vgpu = Vgpu(name, parent.family, parent.name, kind.id, kind.name, None, None, None, None)
    if name is not None:
        return CreateMdev(parent.name, parent.path, kind.id, name), vgpu
    device = host.device(host.parse_address(parent.name))
    return SetVgpuType(device.identity, before=0, after=int(kind.id)), vgpu


def _removal(host: HostSnapshot, vgpu: Vgpu) -> Step:
    if vgpu.uuid is not None:
        paths = {parent.name: parent.path for parent in host.vgpu_parents}
        return RemoveMdev(vgpu.parent, paths[vgpu.parent], vgpu.type, vgpu.uuid)
    device = host.device(host.parse_address(vgpu.parent))
    return SetVgpuType(device.identity, before=int(vgpu.type), after=0)


def _remembered(host: HostSnapshot, vgpu: Vgpu) -> Iterator[SetVgpuAttribute]:
    """What a roll-back has to give a vGPU that it makes again."""
    directory = (MDEV_DEVICES if vgpu.uuid is not None else PCI_DEVICES) / vgpu.name
    for name, text in host.defined.attributes_of(vgpu.name):
        if text.strip():
            yield SetVgpuAttribute(vgpu.name, directory, name, before=text, after=text)


def _fresh(host: HostSnapshot, mark: ReplaceFile) -> ReplaceFile:
    """A mark in the place of one that an instance of this name left behind."""
    left = next((m.text for m in host.vgpu_marks if m.path == mark.path), None)
    return replace(mark, before=left)


def _unmarkings(host: HostSnapshot, files: AbstractSet[HostPath]) -> Iterator[Step]:
    for mark in host.vgpu_marks:
        if mark.path in files:
            yield ReplaceFile(mark.path, mark.text, None)


def _left_marks(host: HostSnapshot, names: Iterable[str]) -> dict[str, str]:
    """The parents of vGPUs that are gone, by name: a run that was cut off had not come further."""
    marks = {mark.path: mark.text for mark in host.vgpu_marks}
    parents = {name: marks.get(MARKS / name, "").split(" ")[0] for name in names}
    functions = {name: name for name in names if host.device_named(name) is not None}
    return {name: parent for name, parent in parents.items() if parent} | functions


def _named(host: HostSnapshot, request: RemoveVgpu) -> tuple[list[Vgpu], tuple[str, ...]]:
    """The vGPUs that are meant, and words for those that are not there."""
    if request.every:
        own = [vgpu for vgpu in _below(host, request.parent) if host.is_own(vgpu)]
        return own, () if own else ("there is no vGPU that vfiomgr made",)
    found: list[Vgpu] = []
    absent: list[str] = []
    for name in request.names:
        vgpu = host.vgpu(name)
        if vgpu is None:
            _require_no_parent(host, name)
            absent.append(f"there is no vGPU {name}")
        else:
            found.append(vgpu)
    return found, tuple(absent)


def _require_no_parent(host: HostSnapshot, name: str) -> None:
    """The GPU, or the parent, of vGPUs that have names of their own is not meant to be none.

    Raises:
        UnknownDevice: it carries such vGPUs.

    """
    carried = [v.name for gpu in gpus(host) for v in gpu.instances if name in (gpu.name, v.parent)]
    if carried:
        message = f"{name} is no vGPU itself, and carries {', '.join(carried)}"
        remedy = f"name them: vfiomgr vgpu remove {' '.join(carried)}; with --all --parent {name} "
        raise UnknownDevice(message, f"{remedy}those that vfiomgr made")


def _below(host: HostSnapshot, parent: str | None) -> list[Vgpu]:
    """The vGPUs of a device, of all without one."""
    if parent is None:
        return list(host.vgpus)
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
            if not host.is_own(vgpu):
                yield f"{vgpu} on {vgpu.parent} was not made by vfiomgr, and stays: name it"


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
    return "remove the vGPUs that vfiomgr made"


def _gpu_locks(host: HostSnapshot, place: Placement) -> Iterator[str]:
    """Those of the GPU, whose memory all share, and of the virtual functions that may be taken."""
    if place.gpu.device is None:
        yield f"parent-{place.gpu.name}"
    else:
        yield device_lock(place.gpu.device)
    for parent in place.gpu.free:
        device = host.device_named(parent.name)
        if device is not None:
            yield device_lock(device)


def _locks(host: HostSnapshot, vgpu: Vgpu) -> Iterator[str]:
    """The name, since one UUID may be asked for on two parents, and the parent."""
    yield f"vgpu-{vgpu.name}"
    yield _parent_lock(host, vgpu.parent)


def _parent_lock(host: HostSnapshot, parent: str) -> str:
    device = host.device_named(parent)
    return f"parent-{parent}" if device is None else device_lock(device)
