"""Place the guest's memory and CPUs on the host nodes of its devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker, refuse_if_any
from vfiomgr.guests.model import PAGES, GuestCell, GuestDevice, GuestRequest, NumaCell, Reason
from vfiomgr.pci.memory import HostTopology, NumaNode
from vfiomgr.units import MIB, format_cpulist, size
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot


Pins = tuple[tuple[int, tuple[int, ...]], ...]
_CHOICE = 2
"""Host nodes to choose the nearest one from."""
_LOCAL, _REMOTE = 10, 20
"""The kernel's distances if the firmware reports none (LOCAL_DISTANCE in topology.h)."""


class NumaShare(Value):
    """The part of the guest that lies on one host node."""

    node: NumaNode
    memory_bytes: int
    vcpus: tuple[int, ...]


class Nodes(Value):
    """The shares of nodes, by node number; empty if the guest is not bound to nodes."""

    shares: tuple[NumaShare, ...]
    pins: Pins
    emulator: tuple[int, ...]
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]
    threads: int = 1
    """Threads of a core of the guest."""

    @property
    def cells(self) -> tuple[GuestCell, ...]:
        """The cells that the guest sees; none if all of it lies on one node."""
        if len(self.shares) < _CHOICE:
            return ()
        return tuple(
            GuestCell(
                NumaCell(number, share.memory_bytes, frozenset(share.vcpus)), share.node.number
            )
            for number, share in enumerate(self.shares)
        )

    @property
    def host_nodes(self) -> tuple[int, ...]:
        """The nodes that hold memory of the guest."""
        return tuple(share.node.number for share in self.shares if share.memory_bytes)


def lay_nodes(host: HostSnapshot, request: GuestRequest, units: Sequence[GuestDevice]) -> Nodes:
    """Place memory and CPUs on the nodes of the devices, if the host has several nodes.

    Raises:
        Refusal: a node has too little free memory; the message has the numbers.
    """
    topology = host.topology
    known = [] if topology is None else _nodes_of(units, topology)
    if topology is None or len(topology.nodes) < _CHOICE or request.numa == "off" or not known:
        refuse_if_any(_missing_pages(topology, request), frozenset())
        return Nodes((), (), (), (), _why_not(topology, request, units))
    nodes = _with_substance(known, topology)
    shares = _shares(request, nodes)
    is_strict = request.numa == "strict"
    missing = (
        _too_little(shares, request, topology) if is_strict else _missing_pages(topology, request)
    )
    refuse_if_any(missing, frozenset())
    pins, emulator = _pins(shares, topology) if request.has_pinning else ((), ())
    reasons = [*_why_nodes(shares, request, units), *_why_pins(shares, topology, pins)]
    return Nodes(shares, pins, emulator, tuple(reasons), tuple(_notes(shares, topology, units)))


def _why_not(
    topology: HostTopology | None, request: GuestRequest, units: Sequence[GuestDevice]
) -> tuple[str, ...]:
    if topology is None:
        return ("NUMA nodes are unknown: memory and CPUs are not bound",)
    if len(topology.nodes) < _CHOICE or request.numa == "off" or not units:
        return ()
    if any(unit.numa_node is not None for unit in units):
        return ("the NUMA nodes of the devices are unknown: memory and CPUs are not bound",)
    return ("no device has a NUMA node (numa_node is -1): memory and CPUs are not bound",)


def _nodes_of(units: Sequence[GuestDevice], topology: HostTopology) -> list[NumaNode]:
    """The nodes of the devices; a node that the topology does not have is unknown."""
    numbers = {unit.numa_node for unit in units}
    return [node for node in topology.nodes if node.number in numbers]


def _with_substance(nodes: list[NumaNode], topology: HostTopology) -> list[NumaNode]:
    """The nodes, or the nearest that have CPUs and memory if none of them has."""
    for has in (_has_cpus, _has_memory):
        if not any(map(has, nodes)):
            nearest = _nearest(nodes[0], [node for node in topology.nodes if has(node)], topology)
            nodes = [*nodes, *nearest]
    return sorted(set(nodes), key=lambda node: node.number)


def _has_cpus(node: NumaNode) -> bool:
    return bool(node.cpus)


def _has_memory(node: NumaNode) -> bool:
    return bool(node.memory_bytes)


def _nearest(
    node: NumaNode, others: Iterable[NumaNode], topology: HostTopology
) -> tuple[NumaNode, ...]:
    """The nearest of some nodes; empty without nodes."""
    numbers = [known.number for known in topology.nodes]
    distances = dict(zip(numbers, node.distances, strict=False))

    def rank(other: NumaNode) -> tuple[int, int]:
        usual = _LOCAL if other.number == node.number else _REMOTE
        return (distances.get(other.number, usual), other.number)

    return tuple(sorted(others, key=rank)[:1])


def _shares(request: GuestRequest, nodes: Sequence[NumaNode]) -> tuple[NumaShare, ...]:
    """Split memory and CPUs equally among the nodes that have any; the first gets the rest."""
    grain = request.hugepage_bytes or MIB
    memory = _parts(request.memory_bytes, [_has_memory(node) for node in nodes], grain)
    counts = _parts(request.vcpus, [_has_cpus(node) for node in nodes], 1)
    shares, first = [], 0
    for node, share, count in zip(nodes, memory, counts, strict=True):
        shares.append(NumaShare(node, share, tuple(range(first, first + count))))
        first += count
    return tuple(shares)


def _parts(total: int, takes: Sequence[bool], grain: int) -> list[int]:
    """Split a total into equal parts of complete grains; earlier parts get the rest."""
    takers = sum(takes)
    grains, rest = divmod(total, grain)
    each, more = divmod(grains, takers) if takers else (0, 0)
    parts, taken = [], 0
    for does_take in takes:
        part = (each + (taken < more)) * grain if does_take else 0
        parts.append(part + (rest if does_take and not taken else 0))
        taken += does_take
    return parts


def _too_little(
    shares: Sequence[NumaShare], request: GuestRequest, topology: HostTopology
) -> Iterator[Diagnostic]:
    """Nodes with too little free memory for their share."""
    if request.hugepage_bytes is not None:
        yield from _uneven(request, request.hugepage_bytes)
    for share in shares:
        free = _free(share.node, request.hugepage_bytes)
        if share.memory_bytes > free:
            kind = (
                f" in huge pages of {size(request.hugepage_bytes)}"
                if request.hugepage_bytes
                else ""
            )
            others = ", ".join(
                f"node {node.number} has {size(_free(node, request.hugepage_bytes))}"
                for node in topology.nodes
            )
            yield blocker(
                "memory-too-little",
                f"node {share.node.number}",
                f"cannot place {size(share.memory_bytes)} of guest memory on NUMA node "
                f"{share.node.number}: only {size(free)} free{kind} ({others})",
                f"{_pages_remedy(share.node, share.memory_bytes, request)}pass less --memory, "
                "--numa preferred (other nodes provide the rest) or --numa off",
            )


def _missing_pages(topology: HostTopology | None, request: GuestRequest) -> Iterator[Diagnostic]:
    """Report missing huge pages, on any node."""
    if request.hugepage_bytes is None:
        return
    yield from _uneven(request, request.hugepage_bytes)
    if topology is None or not topology.nodes:
        return
    free = sum(_free(node, request.hugepage_bytes) for node in topology.nodes)
    if request.memory_bytes > free:
        yield blocker(
            "hugepages-too-few",
            "",
            f"cannot allocate {size(request.memory_bytes)} of guest memory in huge pages of "
            f"{size(request.hugepage_bytes)}: only {size(free)} free",
            f"{_pages_remedy(topology.nodes[0], request.memory_bytes, request)}omit --hugepages",
        )


def _uneven(request: GuestRequest, page: int) -> Iterator[Diagnostic]:
    if request.memory_bytes % page:
        yield blocker(
            "hugepages-uneven",
            "",
            f"{size(request.memory_bytes)} is not a multiple of the huge page size {size(page)}",
            f"round the memory up to {size(-(-request.memory_bytes // page) * page)}",
        )


def _free(node: NumaNode, page_bytes: int | None) -> int:
    if page_bytes is None:
        return node.free_bytes
    pool = node.pool(page_bytes)
    return pool.free * page_bytes if pool else 0


def _pages_remedy(node: NumaNode, wanted: int, request: GuestRequest) -> str:
    """The command that reserves more huge pages on a node, or the sizes that its kernel has."""
    page = request.hugepage_bytes
    if page is None:
        return ""
    pool = node.pool(page)
    sizes = {one.page_bytes for one in node.hugepages}
    known = [name for name, number in PAGES.items() if number in sizes]
    if pool is None and known:
        return f"this kernel has other huge pages: pass --hugepages {' or '.join(known)}, or "
    count = -(-wanted // page) + (pool.total - pool.free if pool else 0)
    place = f"/sys/devices/system/node/node{node.number}/hugepages/hugepages-{page >> 10}kB"
    return f"echo {count} > {place}/nr_hugepages, or "


def _pins(shares: Sequence[NumaShare], topology: HostTopology) -> tuple[Pins, tuple[int, ...]]:
    """Pin each virtual CPU to all CPUs of its node; the scheduler chooses among them."""
    of_cpus = {share.node.number: _cpus_for_guests(share.node, topology) for share in shares}
    pins = tuple(
        (vcpu, of_cpus[share.node.number])
        for share in shares
        for vcpu in share.vcpus
        if of_cpus[share.node.number]
    )
    return pins, tuple(sorted({cpu for _, cpus in pins for cpu in cpus}))


def _cpus_for_guests(node: NumaNode, topology: HostTopology) -> tuple[int, ...]:
    """CPUs without the isolated ones, and without the core of CPU 0 if there are others."""
    usable = [cpu for cpu in node.cpus if cpu not in topology.isolated_cpus]
    others = [cpu for cpu in usable if cpu not in topology.boot_cpu_threads]
    return tuple(others or usable)


def _why_nodes(
    shares: Sequence[NumaShare], request: GuestRequest, units: Sequence[GuestDevice]
) -> Iterator[Reason]:
    for number, share in enumerate(shares):
        node = share.node
        at = [unit.name for unit in units if unit.numa_node == node.number]
        told = f"{', '.join(at)} at" if at else "nearest with CPUs or memory is"
        free = size(_free(node, request.hugepage_bytes))
        known = node.memory_bytes is not None
        memory = f"{free} free of {size(node.memory_bytes or 0)}" if known else "memory unknown"
        text = f"{told} NUMA node {node.number}: {memory}"
        yield Reason(f"cell {number}", f"{text}, CPUs {format_cpulist(node.cpus) or 'none'}")
        yield Reason("nodes", text)


def _why_pins(shares: Sequence[NumaShare], topology: HostTopology, pins: Pins) -> Iterator[Reason]:
    if not pins:
        return
    nodes = ", ".join(
        f"node {share.node.number} has CPUs {format_cpulist(share.node.cpus)}"
        for share in shares
        if share.vcpus
    )
    pinned = {cpu for _, cpus in pins for cpu in cpus}
    kept = format_cpulist(cpu for node in topology.nodes for cpu in node.cpus if cpu not in pinned)
    rest = f"CPUs {kept} remain for the host" if kept else "no CPU is left for the host"
    yield Reason("pins", f"{nodes}; {rest}")


def _notes(
    shares: Sequence[NumaShare], topology: HostTopology, units: Sequence[GuestDevice]
) -> Iterator[str]:
    for share in shares:
        usable = _cpus_for_guests(share.node, topology)
        if len(share.vcpus) > len(usable) > 0:
            yield (
                f"{len(share.vcpus)} virtual CPUs share {len(usable)} CPUs of NUMA node "
                f"{share.node.number} ({format_cpulist(usable)})"
            )
        isolated = [cpu for cpu in share.node.cpus if cpu in topology.isolated_cpus]
        if isolated and share.vcpus:
            yield (
                f"CPUs {format_cpulist(isolated)} of NUMA node {share.node.number} are isolated "
                "(isolcpus=) and not used: the scheduler would run the entire guest on one of "
                "them; to use them, pin each virtual CPU: virsh vcpupin"
            )
    unknown = [unit.name for unit in units if unit.numa_node is None]
    if unknown:
        yield f"{', '.join(unknown)}: NUMA node unknown (numa_node is -1)"
    for unit in units:
        if unit.numa_node is not None and topology.node(unit.numa_node) is None:
            yield f"{unit.name}: NUMA node {unit.numa_node} is not among the nodes of the host"
