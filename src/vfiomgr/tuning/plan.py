"""What is changed on the host while a guest runs, and restored when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import blocker, refuse, refuse_if_any
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.registry import plans
from vfiomgr.pci.cores import unpinned
from vfiomgr.tuning.model import (
    TUNED,
    AddedPages,
    TunedGuest,
    added_by,
    cpus_of,
    others,
    parse_tuned,
)
from vfiomgr.tuning.steps import (
    AllocatePages,
    InhibitSleep,
    IsolateCpus,
    KeepInterrupts,
    RecordTuning,
    RestoreHost,
    TuneHost,
)
from vfiomgr.units import GIB, format_cpulist
from vfiomgr.units import size as shown_size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.engine.plan import Step
    from vfiomgr.pci.memory import NumaNode
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.tuning.steps import HugepageNeeds

LOCK = "tuning"


@plans(TuneHost)
def plan_tuning(host: HostSnapshot, request: TuneHost) -> Plan:
    """Record what will be restored, then allocate huge pages, inhibit sleep, isolate CPUs.

    Steps of an earlier run for the same guest are repeated: the record is written before them. A
    guest that ended without its hook may have other CPUs by now; the earlier ones return first.

    Raises:
        Refusal: no CPU would remain for the host, or the huge pages do not fit.

    """
    guests = parse_tuned(host.files.text(TUNED))
    own = next((guest for guest in guests if guest.uuid == request.uuid), None)
    rest = others(guests, request.uuid)
    refuse_if_any((*_cpu_refusals(host, request, rest), *_interrupt_refusals(host, request)))
    first = own or TunedGuest(request.uuid, request.name)
    pages = first.pages
    if request.hugepages is not None:
        pages = tuple(_pages(host, request, request.hugepages, pages, rest))
    why = request.why if host.files.has_systemd else first.why
    cpus, interrupts = request.cpus or first.cpus, request.interrupts or first.interrupts
    after = TunedGuest(request.uuid, request.name, cpus, pages, why, interrupts)
    if after.is_empty:
        return Plan(f"prepare the host for {request.name}", ())
    record = () if own == after else (RecordTuning(request.uuid, own, after),)
    has_new_pins = own is not None and own.cpus != after.cpus
    steps = (
        *(_isolation(host, rest, first, before=True, after=False) if has_new_pins else ()),
        *record,
        *_steps(after, before=own is not None, after=True),
        *_isolation(host, rest, after, before=own is not None and not has_new_pins, after=True),
    )
    return Plan(f"prepare the host for {request.name}", steps, locks=(LOCK,))


@plans(RestoreHost)
def plan_restoring(host: HostSnapshot, request: RestoreHost) -> Plan:
    """Restore what the record of a guest lists, and remove its entry."""
    guests = parse_tuned(host.files.text(TUNED))
    own = next((guest for guest in guests if guest.uuid == request.uuid), None)
    summary = f"restore the host after {request.name}"
    if own is None:
        return Plan(summary, ())
    rest = others(guests, request.uuid)
    steps = (
        *_steps(own, before=True, after=False),
        *_isolation(host, rest, own, before=True, after=False),
        RecordTuning(own.uuid, own, None),
    )
    return Plan(summary, steps, locks=(LOCK,))


def _steps(guest: TunedGuest, *, before: bool, after: bool) -> Iterator[Step]:
    """The steps for what an entry lists besides CPUs; huge pages first, which fail more often."""
    for pages in guest.pages:
        yield AllocatePages(guest.uuid, pages, before, after)
    if guest.why:
        yield InhibitSleep(guest.uuid, guest.why, before, after)
    if guest.interrupts is not None:
        yield KeepInterrupts(guest.uuid, guest.interrupts, before, after)


# ---- CPUs


def _isolation(
    host: HostSnapshot,
    rest: tuple[TunedGuest, ...],
    guest: TunedGuest,
    *,
    before: bool,
    after: bool,
) -> Iterator[Step]:
    """The step about the CPUs of a guest, if it has some of its own."""
    if guest.cpus:
        left = _host_cpus(host, (*rest, guest))
        yield IsolateCpus(guest.uuid, guest.cpus, left, before, after)


def _host_cpus(host: HostSnapshot, guests: Iterable[TunedGuest]) -> tuple[int, ...]:
    """The CPUs that remain for other work."""
    known = {c for n in (host.topology.nodes if host.topology else ()) for c in n.cpus}
    return tuple(sorted(known - cpus_of(guests)))


def _is_left_without(host: HostSnapshot, guests: Iterable[TunedGuest]) -> bool:
    """Whether no CPU would remain that the scheduler uses: it leaves out those of isolcpus=."""
    topology = host.topology
    known = topology is not None and topology.nodes
    return bool(known and topology and not unpinned(topology, set(cpus_of(guests))))


def _cpu_refusals(
    host: HostSnapshot, request: TuneHost, rest: tuple[TunedGuest, ...]
) -> Iterator[Diagnostic]:
    """Why the CPUs of a guest cannot be isolated."""
    name, cpus = request.name, request.cpus
    if cpus is None:
        return
    if not host.files.has_systemd:
        yield blocker(
            "isolate-cpus",
            name,
            f"cannot isolate the CPUs of {name}: systemd does not run this host",
            f"vfiomgr libvirt hook install {name}, without --isolate-cpus",
        )
    elif not cpus:
        yield blocker(
            "isolate-cpus",
            name,
            f"cannot isolate the CPUs of {name}: it is not pinned to any",
            "pin its CPUs: <cputune><vcpupin vcpu='0' cpuset='2'/>…</cputune>",
        )
    elif _is_left_without(host, (*rest, TunedGuest(request.uuid, name, cpus))):
        pinned = cpus_of(rest)
        also = f", and other guests on {format_cpulist(pinned)}" if pinned else ""
        yield blocker(
            "isolate-cpus",
            name,
            f"cannot isolate the CPUs of {name}: no CPU remains for the host; it is pinned to "
            f"CPUs {format_cpulist(cpus)}{also}",
            "pin its CPUs to fewer",
        )


def _interrupt_refusals(host: HostSnapshot, request: TuneHost) -> Iterator[Diagnostic]:
    """Why the interrupts of a guest cannot be kept on its CPUs."""
    name, asked = request.name, request.interrupts
    if asked is None:
        return
    cannot = f"cannot keep the interrupts of {name} on its CPUs"
    if not host.files.has_systemd:
        yield blocker(
            "keep-interrupts",
            name,
            f"{cannot}: systemd does not run this host",
            f"vfiomgr libvirt hook install {name}, without --interrupts",
        )
    elif not asked.cpus:
        yield blocker(
            "keep-interrupts",
            name,
            f"{cannot}: it is not pinned to any",
            "pin its CPUs: <cputune><vcpupin vcpu='0' cpuset='2'/>…</cputune>",
        )


# ---- huge pages


def _pages(
    host: HostSnapshot,
    request: TuneHost,
    needs: HugepageNeeds,
    own: tuple[AddedPages, ...],
    rest: tuple[TunedGuest, ...],
) -> Iterator[AddedPages]:
    """The pages that are added, and those that an earlier run added.

    Raises:
        Refusal: they are unknown, or do not fit into the free memory.

    """
    size = _page_size(host, request, needs)
    new: dict[int, int] = {}
    free: dict[int, int] = {}
    for part in needs.parts:
        count = -(-part.size_bytes // size)
        nodes = _nodes(host, request, part.nodes, size)
        for node in nodes:
            pool = node.pool(size)
            there = free.setdefault(node.number, pool.free if pool else 0)
            used = min(there, count)
            free[node.number], count = there - used, count - used
        for node in sorted(nodes, key=lambda n: n.free_bytes, reverse=True):
            fitting = min(count, max(0, node.free_bytes // size - new.get(node.number, 0)))
            new[node.number] = new.get(node.number, 0) + fitting
            count -= fitting
        if count:
            _refuse_size(request.name, part.size_bytes, count * size, nodes, size)
    before = {pages.pool: pages for pages in own}
    for node in host.topology.nodes if host.topology else ():
        pool, kept = node.pool(size), before.pop((node.number, size), None)
        if pool is not None and (kept is not None or new.get(node.number)):
            by_others = added_by(rest, (node.number, size))
            base = max(0, pool.total - by_others) if kept is None else kept.base
            added = pool.total + new.get(node.number, 0) - by_others - base
            least = new.get(node.number, 0) if kept is None else kept.added
            yield AddedPages(node.number, size, base, max(least, added))
    yield from before.values()


def _page_size(host: HostSnapshot, request: TuneHost, needs: HugepageNeeds) -> int:
    """The size of the pages of a guest."""
    default = host.topology and host.topology.default_page_bytes
    sizes = set(needs.sizes) or ({default} if default else set())
    why, remedy = "", "write one <page size=…> into <hugepages>"
    if not needs.parts:
        why = "its memory is not backed by huge pages"
        remedy = "add <memoryBacking><hugepages/></memoryBacking>"
    elif len(sizes) != 1:
        why = "it has several page sizes" if sizes else "the default page size is unknown"
    if why:
        message = f"cannot allocate huge pages for {request.name}: {why}"
        refuse("allocate-hugepages", request.name, message, remedy)
    return sizes.pop()


def _nodes(
    host: HostSnapshot, request: TuneHost, numbers: tuple[int, ...], size: int
) -> list[NumaNode]:
    """The nodes that may have the pages.

    Raises:
        Refusal: none has a pool of the size.

    """
    known = host.topology.nodes if host.topology else ()
    nodes = [n for n in known if n.pool(size) and (not numbers or n.number in numbers)]
    if not nodes:
        where = f" on node {format_cpulist(numbers)}" if numbers else ""
        refuse(
            "allocate-hugepages",
            request.name,
            f"cannot allocate huge pages for {request.name}: the kernel has none of "
            f"{shown_size(size)}{where}",
            "write another <page size=…> into <hugepages>, or another node into <numatune>",
        )
    return nodes


def _refuse_size(
    name: str, needed: int, lacking: int, nodes: Iterable[NumaNode], size: int
) -> None:
    """Refuse a guest whose huge pages do not fit.

    Raises:
        Refusal: always.

    """
    memory = ", ".join(f"node {n.number} has {shown_size(n.free_bytes)}" for n in nodes)
    refuse(
        "allocate-hugepages",
        name,
        f"cannot allocate huge pages for {name}: it needs {shown_size(needed)}, and "
        f"{shown_size(lacking)} do not fit into the free memory ({memory})",
        "end programs or guests that use memory, or give it less memory"
        + (f"; or reserve them at boot: {at_boot(size, needed // size)}" if size >= GIB else ""),
    )


def at_boot(size: int, count: int) -> str:
    """The kernel parameters that reserve huge pages at boot."""
    unit = f"{size // GIB}G" if size >= GIB else f"{size >> 20}M"
    return f"hugepagesz={unit} hugepages={count}"
