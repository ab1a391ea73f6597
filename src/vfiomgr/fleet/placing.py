"""Which hosts fit a request for GPUs, vGPUs, GPU instances, memory and CPUs; pure.

The functions of an IOMMU group go to one guest (drivers/vfio/group.c), so a request takes entire
units of GPUs that share groups, even if it needs fewer. A GPU serves one part of the request: as
an entire GPU, with vGPUs of one type, or with GPU instances of one profile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Literal

from msgspec.structs import replace

from vfiomgr.expressions import expression
from vfiomgr.fleet.model import Gpu, HostSummary, Node, natural
from vfiomgr.units import counted, size
from vfiomgr.value import Value, values_by_key

Kind = Literal["gpu", "vgpu", "mig"]
Order = Literal["pack", "spread"]
_WORD = expression(r"[\w.]+")
WORDS: dict[Kind, str] = {"gpu": "GPU", "vgpu": "vGPU", "mig": "GPU instance"}


class Wanted(Value):
    """A part of a request: `2xA40`."""

    kind: Kind
    count: int
    name: str
    """Words of the model of an entire GPU, or its PCI IDs; a vGPU type; a profile of instances."""

    def __str__(self) -> str:
        """`2 x A40`."""
        return f"{self.count} x {self.name}"

    def is_served_by(self, gpu: Gpu) -> bool:
        """Whether a GPU is of this model, or has this type or profile, used or not."""
        if self.kind == "gpu":
            return self.name.lower() == gpu.ids or _is_part(self.name, gpu.name)
        return self._capacity(gpu) is not None

    def is_called(self, name: str) -> bool:
        """Whether this is the name of a type or profile."""
        return name.lower() == self.name.lower()

    def room(self, gpu: Gpu) -> int:
        """How many of it a GPU has room for with certainty, if no part takes it entirely."""
        found = None if self.kind == "gpu" else self._capacity(gpu)
        return 0 if found is None or not found[1] else found[0]

    def may_fit(self, gpu: Gpu) -> bool:
        """Whether it may have room, which the driver does not report."""
        found = self._capacity(gpu)
        return found is not None and found[0] > 0 and not found[1]

    def _capacity(self, gpu: Gpu) -> tuple[int, bool] | None:
        known = gpu.types if self.kind == "vgpu" else gpu.instances
        same = (one for one in known if self.is_called(one.name))
        return next(((one.more, one.is_certain) for one in same), None)


@lru_cache(maxsize=4096)
def _is_part(name: str, model: str) -> bool:
    """Whether words are words of a model: A10 is neither A100 nor A10G."""
    wanted, words = (" ".join(_WORD.findall(text.lower())) for text in (name, model))
    return bool(wanted) and f" {wanted} " in f" {words} "


class Request(Value):
    """What a guest needs."""

    wanted: tuple[Wanted, ...]
    memory_bytes: int = 0
    page_bytes: int = 0
    """The size of the huge pages that its memory is of; 0 for other memory."""
    cpus: int = 0
    is_on_one_node: bool = False


class Reserved(Value):
    """What is not available on a host, besides what its snapshot shows."""

    gpus: frozenset[str] = frozenset()
    is_entire: bool = False
    memory_bytes: int = 0


NOTHING = Reserved()


class Placement(Value):
    """Where a request fits on a host, or why it does not."""

    host: str
    gpus: tuple[str, ...] = ()
    """The addresses that it uses, with those that share IOMMU groups with them."""
    numa_nodes: tuple[int, ...] = ()
    """The NUMA nodes of these GPUs."""
    unused: int = 0
    """GPUs that it takes and does not need, since they share IOMMU groups."""
    left: int = 0
    """Free GPUs that are left on the host."""
    reason: str = ""
    """The kind of reason why it does not fit, without numbers; empty if it fits."""
    why: str = ""
    """The reason with the numbers of the host."""
    time: str | None = None
    """When the snapshot of the host was created; None if unknown."""

    @property
    def fits(self) -> bool:
        """Whether the host fits."""
        return not self.reason


def place(host: HostSummary, request: Request, reserved: Reserved = NOTHING) -> Placement:
    """Where a request fits on a host; with as few unneeded GPUs as possible."""
    if reserved.is_entire:
        return Placement(host.name, reason="reserved", why="the host is reserved")
    against = _too_few(host, request, reserved)
    if against is not None:
        return against
    nodes = [n.number for n in host.nodes] if request.is_on_one_node else [None]
    best: tuple[int, int, tuple[str, ...]] | None = None
    for place_number, number in enumerate(nodes):
        if _lacks(host, request, reserved, number):
            continue
        found = choose(_on(host, number), request.wanted, reserved.gpus)
        if found is not None:
            here = (found[0], place_number, found[1])
            best = here if best is None else min(best, here)
    if best is None:
        return _why_not(host, request, reserved)
    unused, _, chosen = best
    taken = [gpu for gpu in host.gpus if gpu.address in chosen]
    free = [gpu for gpu in host.gpus if gpu.state == "free" and gpu.address not in reserved.gpus]
    return Placement(
        host.name,
        chosen,
        tuple(sorted({gpu.numa_node for gpu in taken if gpu.numa_node is not None})),
        unused,
        sum(gpu.address not in chosen for gpu in free),
    )


def ordered(found: Iterable[Placement], order: Order) -> list[Placement]:
    """The hosts that fit: fullest first to pack, emptiest first to spread; then the others."""
    sign = 1 if order == "pack" else -1

    def key(one: Placement) -> tuple[bool, int, int, list[tuple[int, str]]]:
        return (not one.fits, sign * one.left, one.unused, natural(one.host))

    return sorted(found, key=key)


def _on(host: HostSummary, number: int | None) -> tuple[Gpu, ...]:
    """The GPUs of units that are on a NUMA node; without a number, and with one node, all."""
    if number is None or len(host.nodes) == 1:
        return host.gpus
    elsewhere = {gpu.unit for gpu in host.gpus if gpu.numa_node != number}
    return tuple(gpu for gpu in host.gpus if gpu.unit not in elsewhere)


def choose(
    gpus: Sequence[Gpu], wanted: Sequence[Wanted], reserved: frozenset[str] = frozenset()
) -> tuple[int, tuple[str, ...]] | None:
    """The number of GPUs that are taken and not needed, and all that are taken; None without a way.

    The number is the least possible one. Either a guest has a unit entirely, or its GPUs serve
    vGPUs or GPU instances, each on its own.
    """
    none = (0,) * len(wanted)
    has_parts = any(one.kind != "gpu" for one in wanted)
    least = (0, sum(one.count for one in wanted if one.kind == "gpu"))
    states: _States = {tuple(one.count for one in wanted): (0, 0, ())}
    for unit in values_by_key((gpu.unit, gpu) for gpu in gpus).values():
        shared = states
        for gpu in unit if has_parts else ():
            shared = _merged(shared, _continued(shared, _parts_of(gpu, wanted, reserved)))
        entire = _continued(states, _entire(unit, wanted, reserved))
        states = _merged(shared, entire)
        if none in states and states[none][:2] == least:
            break
    found = states.get(none)
    return None if found is None else (found[0], found[2])


_Left = tuple[int, ...]
"""What is still missing of each part of a request."""
_States = dict[_Left, tuple[int, int, tuple[str, ...]]]
"""For each, the least number of unneeded GPUs, the number of GPUs, and these."""
_Use = tuple[_Left, tuple[str, ...]]
"""How much of each part some GPUs serve."""


def _continued(states: _States, uses: Iterable[_Use]) -> _States:
    found: _States = {}
    for served, names in uses:
        for left, (unused, count, taken) in states.items():
            rest = tuple([a - b if a > b else 0 for a, b in zip(left, served, strict=True)])
            if rest == left:
                continue
            spare = 0 if len(names) == 1 else len(names) - sum(left) + sum(rest)
            cost = (unused + spare, count + len(names), (*taken, *names))
            if rest not in found or cost < found[rest]:
                found[rest] = cost
    return found


def _merged(one: _States, other: _States) -> _States:
    """The better way to each state."""
    if not other:
        return one
    both = dict(one)
    for left, cost in other.items():
        if left not in both or cost < both[left]:
            both[left] = cost
    return both


def _entire(
    unit: Sequence[Gpu], wanted: Sequence[Wanted], reserved: frozenset[str]
) -> Iterator[_Use]:
    """The ways in which a guest can have all GPUs of a unit."""
    names = tuple(gpu.address for gpu in unit)
    if any(gpu.state != "free" for gpu in unit) or not reserved.isdisjoint(names):
        return
    numbers = [n for n, one in enumerate(wanted) if one.kind == "gpu"]
    fitting = ([n for n in numbers if wanted[n].is_served_by(gpu)] or [-1] for gpu in unit)
    for parts in product(*fitting):
        served = tuple(map(parts.count, range(len(wanted))))
        if any(served):
            yield served, names


def _parts_of(gpu: Gpu, wanted: Sequence[Wanted], reserved: frozenset[str]) -> Iterator[_Use]:
    """What vGPUs or GPU instances a GPU can carry, of one part of the request."""
    for number, one in enumerate(wanted if gpu.address not in reserved else ()):
        if room := one.room(gpu):
            served = tuple(room if n == number else 0 for n in range(len(wanted)))
            yield served, (gpu.address,)


# ---- why a host does not fit


def after(host: HostSummary, request: Request, found: Placement) -> HostSummary:
    """The host when a placed guest has its GPUs; vGPUs leave no certain room for other types."""
    left = {number: one.count for number, one in enumerate(request.wanted) if one.kind != "gpu"}
    chosen = {gpu.unit for gpu in host.gpus if gpu.address in found.gpus}
    gpus = []
    for gpu in host.gpus:
        number = next((n for n, c in left.items() if c and request.wanted[n].room(gpu)), None)
        if gpu.address in found.gpus and number is not None:
            count = min(left[number], request.wanted[number].room(gpu))
            left[number] -= count
            gpus.append(_with_less(gpu, request.wanted[number], count))
        elif gpu.unit in chosen:
            gpus.append(replace(gpu, state="used", why=_PLACED, types=(), instances=()))
        else:
            gpus.append(gpu)
    return replace(host, gpus=tuple(gpus))


_PLACED = "placed before"


def _with_less(gpu: Gpu, one: Wanted, count: int) -> Gpu:
    """A GPU that carries more vGPUs or instances."""
    room = one.room(gpu) - count
    same = (replace(c, more=room) for c in (*gpu.types, *gpu.instances) if one.is_called(c.name))
    kept = tuple(same)
    types, instances = (kept, ()) if one.kind == "vgpu" else ((), kept)
    return replace(gpu, state="used", why=_PLACED, types=types, instances=instances)


def _lacks(
    host: HostSummary, request: Request, reserved: Reserved, number: int | None
) -> tuple[str, str] | None:
    """What of memory and CPUs a host lacks, on one node or in total; the kind and the numbers."""
    nodes = [n for n in host.nodes if number in (None, n.number)]
    where = "" if number is None else f" on NUMA node {number}"
    if (request.memory_bytes or request.cpus) and not nodes:
        return "memory or CPUs unknown", "the snapshot has no NUMA nodes"
    if request.memory_bytes:
        known = [_free_memory(node, request.page_bytes) for node in nodes]
        free = sum(one or 0 for one in known) - reserved.memory_bytes
        kind = f"in free huge pages of {size(request.page_bytes)}" if request.page_bytes else "free"
        if free < request.memory_bytes and None in known:
            return "memory or CPUs unknown", f"the snapshot does not have its memory{where}"
        if free < request.memory_bytes:
            told = f"{size(max(0, free))} {kind}{where}, {size(request.memory_bytes)} needed"
            return "too little memory", told
    cpus = sum(node.cpus for node in nodes)
    if cpus < request.cpus:
        return "too few CPUs", f"{counted(cpus, 'CPU')}{where}, {request.cpus} needed"
    return None


def _free_memory(node: Node, page_bytes: int) -> int | None:
    if page_bytes:
        return node.free_pages.get(page_bytes, 0)
    return None if node.memory_bytes is None else node.free_bytes


def _too_few(host: HostSummary, request: Request, reserved: Reserved) -> Placement | None:
    """The reason if a host has too few GPUs for a part, wherever they are."""
    for one in request.wanted:
        fitting = [gpu for gpu in host.gpus if one.is_served_by(gpu)]
        if not fitting:
            what = "GPU of this model" if one.kind == "gpu" else f"{WORDS[one.kind]} of this type"
            return Placement(host.name, reason=f"no {what}", why=f"no {WORDS[one.kind]} {one.name}")
        open_ones = [gpu for gpu in fitting if gpu.address not in reserved.gpus]
        if one.kind == "gpu":
            count = sum(gpu.state == "free" for gpu in open_ones)
            unknown = sum(gpu.state == "unknown" for gpu in open_ones)
        else:
            count = sum(map(one.room, open_ones))
            unknown = sum(not one.room(gpu) and one.may_fit(gpu) for gpu in open_ones)
        if count < one.count:
            is_open = bool(unknown) and count + unknown >= one.count
            reason = "users or capacity unknown" if is_open else "too few are free"
            return Placement(host.name, reason=reason, why=_told(one, fitting, count, reserved))
    return None


def _told(one: Wanted, fitting: Sequence[Gpu], count: int, reserved: Reserved) -> str:
    """`2 x A40: 1 of 4 free (2 used, 1 unknown)`."""
    if one.kind != "gpu":
        return f"{one}: capacity for {count} on {counted(len(fitting), 'GPU')}"
    states = [g.state if g.address not in reserved.gpus else "reserved" for g in fitting]
    others = [state for state in states if state != "free"]
    told = ", ".join(f"{others.count(state)} {state}" for state in dict.fromkeys(others))
    return f"{one}: {count} of {len(fitting)} free{f' ({told})' if told else ''}"


def _why_not(host: HostSummary, request: Request, reserved: Reserved) -> Placement:
    """The reason if a host has enough GPUs for each part, but not in the way that is needed."""
    lacking = _lacks(host, request, reserved, None)
    if lacking is not None:
        return Placement(host.name, reason=lacking[0], why=lacking[1])
    if choose(host.gpus, request.wanted, reserved.gpus) is None:
        why = "its free GPUs share IOMMU groups, or one GPU would serve two parts of the request"
        return Placement(host.name, reason="GPUs cannot be combined", why=why)
    by_node = [
        f"node {node.number}: {_free_on(host, node.number, request, reserved)}"
        for node in host.nodes
    ]
    lacks = filter(None, (_lacks(host, request, reserved, n.number) for n in host.nodes))
    told = next((why for _, why in lacks), "")
    why = "; ".join((*by_node, *([told] if told else [])))
    return Placement(host.name, reason="not on one NUMA node", why=why or "NUMA nodes unknown")


def _free_on(host: HostSummary, number: int, request: Request, reserved: Reserved) -> str:
    """`1 x A40`: what is free on a node of each part."""
    there = [gpu for gpu in _on(host, number) if gpu.address not in reserved.gpus]
    return ", ".join(
        f"{sum(g.state == 'free' and w.is_served_by(g) for g in there)} x {w.name}"
        if w.kind == "gpu"
        else f"{sum(map(w.room, there))} x {w.name}"
        for w in request.wanted
    )
