"""Selection of the vGPU type and of the GPUs for a request."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Option, Remedy, blocker, refusal
from vfiomgr.errors import Refusal, UnknownDevice, UsageError
from vfiomgr.listing import first_of
from vfiomgr.pci.model import PciAddress
from vfiomgr.snapshot.named import find_device
from vfiomgr.value import Value
from vfiomgr.vgpu.absence import absence, candidates
from vfiomgr.vgpu.capacity import (
    Capacity,
    Gpu,
    by_number,
    gpus,
    in_order,
    is_locked,
    room,
    why_none_is_free,
)
from vfiomgr.vgpu.model import VgpuParent, VgpuType, types_called

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.steps import CreateVgpu

_MOST_REASONS = 8
_MOST_GPUS = 4


class Placement(Value):
    """The GPU, parent and type of one new vGPU."""

    gpu: Gpu
    parent: VgpuParent
    type: VgpuType


class Placements(Value):
    """The placements of all vGPUs of a request, and why other GPUs were not selected."""

    places: tuple[Placement, ...]
    notes: tuple[str, ...]


def choose(host: HostSnapshot, request: CreateVgpu) -> Placements:
    """Find placements for all requested vGPUs.

    Raises:
        UnknownDevice: the parent or a matching type is not found.
        Refusal: there is no room for all of them; the message names the reason for each GPU.
    """
    asked = _asked_gpus(host, request)
    fitting = {gpu.name: sorted(serving(gpu, request), key=_by_size) for gpu in asked}
    if not any(fitting.values()):
        raise _no_such_type(asked, request)
    reasons: dict[str, str] = {}
    open_gpus = [gpu for gpu in asked if _is_open(gpu, fitting[gpu.name], request, reasons)]
    count = len(request.uuids)
    sizes = _sizes(fitting[gpu.name] for gpu in open_gpus)
    for makes_instances, size in itertools.product((False, True), sizes):
        candidates = list(_candidates(open_gpus, fitting, size, makes_instances=makes_instances))
        if sum(found.more for _, found in candidates) >= count:
            considered = {gpu.name for gpu, _ in candidates}
            for gpu in open_gpus:
                if gpu.name not in considered:
                    reasons[gpu.name] = _why_none(gpu, fitting[gpu.name])
            return _placed(candidates, request, reasons)
    raise _no_room(open_gpus, fitting, request, reasons)


def find_parents(host: HostSnapshot, name: str) -> list[Gpu]:
    """Find a GPU by name, with all its parents or only the named parent.

    Raises:
        UnknownDevice: the device is not found, or does not support vGPUs.
    """
    known = gpus(host)
    for gpu in known:
        if _is_same(name, gpu.name):
            return [gpu]
    for gpu in known:
        for parent in gpu.parents:
            if _is_same(name, parent.name):
                return [replace(gpu, asked=parent.name)]
    raise _no_parent(host, name, known)


def _no_parent(host: HostSnapshot, name: str, known: Sequence[Gpu]) -> UnknownDevice:
    if ":" not in name:  # as only addresses have
        names = ", ".join(gpu.name for gpu in known)
        message = f"no such vGPU-capable device: {name}"
        message += f" (available: {names})" if known else " (this host has none)"
        return UnknownDevice(message, "list vGPU types with: vfiomgr vgpu list --types")
    device = find_device(host, name)
    gpu = host.device_named(str(device.physical_function)) or device
    if device is not gpu and device.is_on_vfio:
        message = f"{device} does not support vGPUs in its current state"
        remedy = f"unbind it from {device.driver}: vfiomgr unbind {device.address}"
        return UnknownDevice(message, remedy)
    found = absence(host, gpu)
    state = "" if found.is_final else " in its current state"
    message = f"{device} does not support vGPUs{state}: {gpu.address} {found.cause}"
    return UnknownDevice(message, found.remedy)


def _is_same(text: str, name: str) -> bool:
    """Whether both are the same name, or the same PCI address in different forms."""
    try:
        return text == name or PciAddress.parse(text) == PciAddress.parse(name)
    except UsageError:
        return False


def _asked_gpus(host: HostSnapshot, request: CreateVgpu) -> list[Gpu]:
    found = find_parents(host, request.parent) if request.parent is not None else list(gpus(host))
    if not found:
        raise no_gpus(host)
    return found


def no_gpus(host: HostSnapshot) -> UnknownDevice:
    """The error for a host without parents of vGPUs: the cause and the remedy for each GPU."""
    known = [(device, absence(host, device)) for device in candidates(host)]
    message = "no device of this host supports vGPUs"
    if not known:
        remedy = "vGPUs need a GPU of NVIDIA, or of Intel up to the 10th generation"
        return UnknownDevice(message, f"{remedy}; list the devices with: vfiomgr list --all")
    if not all(one.is_final for _, one in known):
        message += " in its current state"
    causes, more = first_of([f"{device.address} {one.cause}" for device, one in known], _MOST_GPUS)
    open_ones = [one for _, one in known if not one.is_final] or [one for _, one in known]
    remedies = dict.fromkeys(one.remedy for one in open_ones[:_MOST_GPUS])
    return UnknownDevice(f"{message}: {'; '.join((*causes, *more))}", "; ".join(remedies))


def _by_size(kind: VgpuType) -> tuple[int, int, int, tuple[str, int, str]]:
    """Sort key for types: memory, then heads; unknown sizes last."""
    unknown = kind.framebuffer is None
    return int(unknown), kind.framebuffer or 0, kind.heads or 0, by_number(kind)


def serving(gpu: Gpu, request: CreateVgpu) -> list[VgpuType]:
    """The types of a GPU that match a request, by name or by properties, in driver order."""
    kinds = gpu.types if request.type is None else types_called(gpu.types, request.type)
    return [kind for kind in kinds if _meets_need(kind, request)]


def _meets_need(kind: VgpuType, request: CreateVgpu) -> bool:
    if request.series is not None and kind.series != request.series:
        return False
    if request.framebuffer is not None and (kind.framebuffer or 0) < request.framebuffer:
        return False
    return request.heads is None or (kind.heads or 0) >= request.heads


def _is_open(
    gpu: Gpu, kinds: Sequence[VgpuType], request: CreateVgpu, reasons: dict[str, str]
) -> bool:
    """Whether a GPU is a candidate; if not, record the reason."""
    if not kinds:
        reasons[gpu.name] = f"no type {_request(request)}"
    elif request.numa_node is not None and gpu.numa_node != request.numa_node:
        node = "none" if gpu.numa_node is None else gpu.numa_node
        reasons[gpu.name] = f"on NUMA node {node}, not {request.numa_node}"
    else:
        return True
    return False


def _sizes(fitting: Iterable[Sequence[VgpuType]]) -> list[int | None]:
    """The matching sizes in order; larger ones are used only if smaller ones do not suffice."""
    found = {kind.framebuffer for kinds in fitting for kind in kinds}
    known: list[int | None] = [*sorted(size for size in found if size is not None)]
    return [*known, None] if None in found else known


def _candidates(
    open_gpus: Sequence[Gpu],
    fitting: dict[str, list[VgpuType]],
    size: int | None,
    *,
    makes_instances: bool,
) -> Iterator[tuple[Gpu, Capacity]]:
    """Yield each GPU with its smallest matching type, up to a size, that it has room for.

    GPU instances (MIG) are created only if the existing ones do not suffice.
    """
    for gpu in open_gpus:
        for kind in fitting[gpu.name]:
            if size is not None and (kind.framebuffer is None or kind.framebuffer > size):
                continue
            found = room(gpu, kind)
            if makes_instances:
                found = replace(found, more=found.more + found.makeable)
            if found.more:
                yield gpu, found
                break


def _placed(
    candidates: Sequence[tuple[Gpu, Capacity]], request: CreateVgpu, reasons: dict[str, str]
) -> Placements:
    count = len(request.uuids)
    spread = _share_out(candidates, count, request.strategy)
    places: list[Placement] = []
    notes: list[str] = []
    for gpu, found in candidates:
        number = spread[gpu.name]
        kind = found.type
        free = sorted(gpu.free, key=lambda parent: not parent.offers(kind.id))
        if not found.makeable:
            free = [parent for parent in free if parent.offers(kind.id)] or free
        parents = free[:number] if gpu.is_divided else free[:1] * number
        places += [Placement(gpu, parent, kind) for parent in parents]
        if number:
            notes.append(f"{gpu.name}: {number} x {kind}, {_why_chosen(gpu, found, number)}")
        else:
            reasons[gpu.name] = f"has capacity, but {request.strategy} prefers another"
    order = {gpu.name: place for place, (gpu, _) in enumerate(candidates)}
    places.sort(key=lambda place: order[place.gpu.name])
    return Placements(tuple(places), (*notes, *_listed(reasons)))


def _why_chosen(gpu: Gpu, found: Capacity, number: int) -> str:
    size = found.type.framebuffer
    parts = [f"{found.more} more"]
    if not found.is_certain:
        parts = [f"at most {found.more} more (free VFs do not report all types)"]
    if gpu.lock is not None and gpu.lock == size:
        parts.append("it has vGPUs of this size")
    if gpu.framebuffer and size and gpu.partition is None:
        parts.append(f"{gpu.framebuffer - sum(gpu.sizes) - number * size:,} MiB remain")
    return ", ".join(parts)


def _share_out(
    candidates: Sequence[tuple[Gpu, Capacity]], count: int, strategy: str
) -> dict[str, int]:
    """Distribute the vGPUs to GPUs.

    `pack` fills GPUs with vGPUs of this size first, then those that waste the least memory, one
    after the other; `spread` places each vGPU on the GPU with the fewest.
    """
    given = {gpu.name: 0 for gpu, _ in candidates}
    room_of = {gpu.name: found.more for gpu, found in candidates}
    if strategy == "pack":
        for gpu, _ in sorted(candidates, key=_packing):
            given[gpu.name] = min(room_of[gpu.name], count - sum(given.values()))
        return given
    for _ in range(count):
        open_ones = [item for item in candidates if given[item[0].name] < room_of[item[0].name]]
        gpu, _room = min(
            open_ones,
            key=lambda item: (len(item[0].instances) + given[item[0].name], _packing(item)),
        )
        given[gpu.name] += 1
    return given


def _packing(item: tuple[Gpu, Capacity]) -> tuple[bool, int, bool, tuple[int, PciAddress | str]]:
    gpu, found = item
    is_alike = bool(gpu.instances) and (gpu.lock in (None, found.type.framebuffer))
    stranded = 0 if is_alike and gpu.lock is not None else found.stranded or 0
    return not is_alike, stranded, not gpu.instances, in_order(gpu.name)


def _no_such_type(asked: Sequence[Gpu], request: CreateVgpu) -> UnknownDevice | Refusal:
    """Build the error for a request that no type matches."""

    def refused(rule: str, text: str, remedy: str) -> Refusal:
        return refusal([blocker(rule, ", ".join(gpu.name for gpu in asked), text, remedy)])

    where = asked[0].name if len(asked) == 1 else "no GPU of this host"
    kinds = {str(kind): kind for gpu in asked for kind in gpu.types}
    full = [gpu for gpu in asked if gpu.is_divided and not gpu.free]
    if len(full) == len(asked) and request.type not in {kind.id for kind in kinds.values()}:
        why = [f"{gpu.name}: {why_none_is_free(gpu)}" for gpu in full]
        text = f"no capacity for a vGPU {_request(request)}: {'; '.join(why)}"
        return refused(
            "vgpu-no-capacity",
            text,
            "remove one with vfiomgr vgpu remove; list them with: vfiomgr vgpu list",
        )
    verb = "has no" if len(asked) == 1 else "has a"
    message = f"{where} {verb} vGPU type {_request(request)}"
    if not kinds:
        return refused(
            "vgpu-type-unavailable",
            f"{message}: its driver offers none now",
            "check dmesg, and run: nvidia-smi vgpu -c",
        )
    message += f"; available: {', '.join(kinds)}"
    if any(gpu.family == "vendor-vfio" and gpu.instances for gpu in asked):
        message += " (the driver lists only types that fit with the active vGPUs)"
        return refused(
            "vgpu-type-unavailable", message, "remove those vGPUs first (vfiomgr vgpu list)"
        )
    untold = _untold(tuple(kinds.values()), request)
    if untold:
        first = next(iter(kinds.values())).id
        return UnknownDevice(
            f"{message}; unknown: their {', '.join(untold)}",
            Remedy("name one by its ID: ", Option("type", f"--type {first}", first)),
        )
    return UnknownDevice(message, guess(kinds.values(), request.type or ""))


def guess(kinds: Iterable[VgpuType], text: str) -> str:
    """Suggest a similar name for a type that is not found.

    Similar numbers are not suggested, because they belong to other types.
    """
    number = text.rpartition("-")[2]
    names = [
        name
        for kind in kinds
        for name in (kind.id, kind.name, kind.short_name)
        if name and (name != kind.id or not kind.number.isdecimal() or kind.number == number)
    ]
    import difflib  # noqa: PLC0415 - slow to import

    close = difflib.get_close_matches(text, names, n=1)
    return (
        f"did you mean {close[0]}?" if close else "list the types with: vfiomgr vgpu list --types"
    )


def _untold(kinds: Sequence[VgpuType], request: CreateVgpu) -> list[str]:
    """The requested properties that are unknown for all types; an ID needs no name."""
    prefixes = {kind.id.removesuffix(kind.number) for kind in kinds}
    text = request.type or ""
    is_identifier = text.isdecimal() or any(text.startswith(prefix) for prefix in prefixes)
    asked = {
        "names": text != "" and not is_identifier and all(k.name in (None, k.id) for k in kinds),
        "memory": request.framebuffer is not None and all(k.framebuffer is None for k in kinds),
        "series": request.series is not None and all(k.series is None for k in kinds),
        "heads": request.heads is not None and all(k.heads is None for k in kinds),
    }
    return [what for what, is_untold in asked.items() if is_untold]


def _no_room(
    open_gpus: Sequence[Gpu],
    fitting: dict[str, list[VgpuType]],
    request: CreateVgpu,
    reasons: dict[str, str],
) -> Refusal:
    count = len(request.uuids)
    room_in_all = 0
    for gpu in open_gpus:
        best = max((room(gpu, kind) for kind in fitting[gpu.name]), key=_room_in_the_end)
        room_in_all += _room_in_the_end(best)
        reasons[gpu.name] = (
            f"capacity for {_room_in_the_end(best)} of {best.type}"
            if _room_in_the_end(best)
            else _why_none(gpu, fitting[gpu.name])
        )
    fewer = "remove one with vfiomgr vgpu remove"
    is_size = any(is_locked(gpu, kind) for gpu in open_gpus for kind in fitting[gpu.name])
    first = Remedy("", Option("sizes", fewer)) if is_size else Remedy(fewer)
    modes = dict.fromkeys(room(gpu, kind).remedy for gpu in open_gpus for kind in fitting[gpu.name])
    wanted = f"{count} vGPUs" if count > 1 else "a vGPU"
    message = f"no capacity for {wanted} {_request(request)}"
    message += f" ({room_in_all} would fit)" if room_in_all else ""
    return refusal(
        [
            blocker(
                "vgpu-no-capacity",
                ", ".join(reasons),
                f"{message}: {'; '.join(_listed(reasons))}",
                *(remedy for remedy in modes if remedy is not None),
                first,
                "use another type; list the types that fit with: vfiomgr vgpu list --types",
            )
        ]
    )


def _room_in_the_end(found: Capacity) -> int:
    """The capacity including new GPU instances."""
    return found.more + found.makeable


def _why_none(gpu: Gpu, kinds: Sequence[VgpuType]) -> str:
    """Return why a GPU has no room for the matching types, once per reason."""
    found = {room(gpu, kind).why_not: kind for kind in reversed(kinds)}
    return "; ".join(f"no capacity for another {kind}: {why}" for why, kind in found.items())


def _listed(reasons: dict[str, str]) -> list[str]:
    lines = [f"{name}: {reason}" for name, reason in reasons.items()]
    shown, more = first_of(lines, _MOST_REASONS, " GPUs")
    return [*shown, *more]


def _request(request: CreateVgpu) -> str:
    """Describe the requested type."""
    parts = [str(request.type)] if request.type is not None else []
    parts += [f"of series {request.series}"] if request.series is not None else []
    if request.framebuffer is not None:
        parts.append(f"of {request.framebuffer} MiB or more")
    parts += [f"with {request.heads} heads or more"] if request.heads is not None else []
    return ", ".join(parts) or "of any kind"
