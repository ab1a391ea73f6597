"""Memory: NUMA nodes with their CPUs, windows for large BARs, and how much a GPU has of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from vfiomgr.expressions import expression
from vfiomgr.paths import HostPath
from vfiomgr.units import GIB, MIB, parse_cpulist
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciDevice


class HugepagePool(Value):
    """The huge pages of one size on a node: the total, and the free ones."""

    page_bytes: int
    total: int
    free: int


class NumaNode(Value):
    """`/sys/devices/system/node/node<number>`; it may have no CPUs or no memory."""

    number: int
    cpus: tuple[int, ...]
    """The online CPUs."""
    memory_bytes: int | None
    """None if unknown, e.g. in a recording without meminfo."""
    free_bytes: int
    """Free memory, including reclaimable page cache."""
    hugepages: tuple[HugepagePool, ...] = ()
    distances: tuple[int, ...] = ()
    """Distances to the online nodes, by number; 10 to itself (ACPI's SLIT)."""

    def pool(self, page_bytes: int) -> HugepagePool | None:
        """The pages of a size."""
        return next((pool for pool in self.hugepages if pool.page_bytes == page_bytes), None)


class HostTopology(Value):
    """The nodes and CPUs of a host."""

    nodes: tuple[NumaNode, ...]
    """Sorted by number; empty if the kernel does not support NUMA."""
    boot_cpu_threads: tuple[int, ...] = ()
    """The threads of the core of CPU 0, which handles the host's interrupts and timers."""
    isolated_cpus: tuple[int, ...] = ()
    """CPUs excluded from the scheduler (isolcpus=)."""
    default_page_bytes: int | None = None
    """The size of huge pages that are asked for without a size; None if unknown."""
    cores: tuple[tuple[int, ...], ...] = ()
    """The threads of each core; empty if not read."""
    caches: tuple[tuple[int, ...], ...] = ()
    """The CPUs that share a third-level cache; empty if not read, or if there is none."""

    def node(self, number: int | None) -> NumaNode | None:
        """The node with this number."""
        return next((node for node in self.nodes if node.number == number), None)


NODES = HostPath("/sys/devices/system/node")
CPUS = HostPath("/sys/devices/system/cpu")
_NODE = expression(r"node(\d+)")
_POOL = expression(r"hugepages-(\d+)kB")
_MEMORY = expression(r"Node \d+ ([\w()]+): +(\d+) kB")
_DEFAULT_PAGE = expression(r"Hugepagesize: +(\d+) kB")
_KIB = 1024
_GIVEN_UP = ("MemFree", "Inactive(file)", "SReclaimable")
"""Counters of available memory of a node, like MemAvailable, which only the host has."""


def read_topology(tree: HostTree) -> HostTopology:
    """The nodes with their present free memory, and the CPUs."""
    names = filter(None, map(_NODE.fullmatch, tree.children(NODES)))
    online = parse_cpulist(tree.read(CPUS / "online"))
    nodes = [_read_node(tree, int(match[1]), frozenset(online)) for match in names]
    threads = tree.read(CPUS / "cpu0/topology/thread_siblings_list")
    return HostTopology(
        nodes=tuple(sorted(nodes, key=lambda node: node.number)),
        boot_cpu_threads=parse_cpulist(threads),
        isolated_cpus=parse_cpulist(tree.read(CPUS / "isolated")),
        default_page_bytes=_default_page(tree.read(HostPath("/proc/meminfo"))),
    )


def near_nodes(tree: HostTree) -> dict[int, tuple[int, ...]]:
    """The nodes near each node: itself, then the nearest others, as far as they are in its socket.

    A node whose socket is unknown, since it has no CPU, counts as near: drivers of Kubernetes agree
    on that (GetNUMANodeAttribute in k8s.io/dynamic-resource-allocation 1.37).
    """
    nodes = read_topology(tree).nodes
    sockets = {node.number: _socket(tree, node) for node in nodes}
    found = {}
    for node in nodes:
        own, others = sockets[node.number], {}
        if len(node.distances) == len(nodes):
            others = dict(zip(sockets, node.distances, strict=True))
            del others[node.number]
        least = min(others.values(), default=None)
        found[node.number] = (
            node.number,
            *(
                number
                for number, distance in others.items()
                if distance == least and (own is None or sockets[number] in (own, None))
            ),
        )
    return found


def _socket(tree: HostTree, node: NumaNode) -> int | None:
    for cpu in node.cpus[:1]:
        return tree.read_number(CPUS / f"cpu{cpu}/topology/physical_package_id")
    return None


def _default_page(meminfo: str | None) -> int | None:
    """Hugepagesize is that of default_hstate (hugetlb_report_meminfo in mm/hugetlb.c)."""
    found = _DEFAULT_PAGE.search(meminfo or "")
    return int(found[1]) * _KIB if found else None


def _read_node(tree: HostTree, number: int, online: frozenset[int]) -> NumaNode:
    directory = NODES / f"node{number}"
    memory = dict(_MEMORY.findall(tree.read(directory / "meminfo") or ""))
    cpus = parse_cpulist(tree.read(directory / "cpulist"))
    distances = tree.read(directory / "distance") or ""
    return NumaNode(
        number=number,
        cpus=tuple(cpu for cpu in cpus if not online or cpu in online),
        memory_bytes=int(memory["MemTotal"]) * _KIB if "MemTotal" in memory else None,
        free_bytes=sum(int(memory.get(name, 0)) for name in _GIVEN_UP) * _KIB,
        hugepages=_read_pools(tree, directory / "hugepages"),
        distances=tuple(map(int, filter(str.isdecimal, distances.split()))),
    )


def _read_pools(tree: HostTree, directory: HostPath) -> tuple[HugepagePool, ...]:
    matches = filter(None, map(_POOL.fullmatch, tree.children(directory)))
    pools = (
        HugepagePool(
            page_bytes=int(match[1]) * _KIB,
            total=tree.read_number(directory / match[0] / "nr_hugepages") or 0,
            free=tree.read_number(directory / match[0] / "free_hugepages") or 0,
        )
        for match in matches
    )
    return tuple(sorted(pools, key=lambda pool: pool.page_bytes))


TCG_BITS = 40
"""Address bits of a CPU emulated by QEMU (TCG_PHYS_ADDR_BITS in target/i386/cpu.h)."""
DEFAULT_WINDOW = 32 * GIB
"""The default of q35 (pci-hole64-size), and of OVMF with an unknown width (PcdPciMmio64Size)."""
_BELOW_4G = {True: 2 * GIB, False: 3 * GIB}
"""Bytes of memory below 4 GiB on q35 and i440fx, if there is that much (pc_q35_init, pc_init1)."""
_FITS_BELOW_4G = {True: 0xB0000000, False: 0xE0000000}
_AMD_RESERVED = 0xFD_0000_0000
"""AMD_HT_START (hw/i386/pc.c): memory is moved to 1 TiB if its window would reach this address."""
_TIB = 1 << 40
_OF_EMULATED = MIB
"""Bytes of the window per emulated device: BAR 4 of virtio in the smallest window of a port."""


def bar_window(slots: Iterable[Sequence[PciDevice]], emulated: int = 0) -> int:
    """The 64-bit window for the functions of each slot behind a bridge, in GiB.

    Only 64-bit prefetchable BARs count. A virtual function has its share of the physical function's
    VF BARs as its own; QEMU hides those from guests, and a resizable BAR gets its present size at
    most (vfio_add_ext_cap in hw/vfio/pci.c). Emulated devices behind ports use some of the window
    too, if the host's devices need one.
    """
    end = 0
    for sizes in sorted(map(_large, slots), key=_largest, reverse=True):
        end = _aligned(end, _largest(sizes) or 1) + sum(sizes)
    return _aligned(end + emulated * _OF_EMULATED, GIB) if end else 0


def _largest(sizes: Sequence[int]) -> int:
    """The largest BAR, to which all BARs of a unit are aligned."""
    return max(sizes, default=0)


def _large(slot: Iterable[PciDevice]) -> tuple[int, ...]:
    return tuple(
        bar.size
        for function in slot
        for bar in function.bars
        if bar.is_memory and bar.is_64bit and bar.is_prefetchable
    )


def port_window(slot: Iterable[PciDevice]) -> int:
    """The 32-bit window of a bridge for a slot: its other memory BARs; a power of two."""
    others = [
        bar.size
        for function in slot
        for bar in function.bars
        if bar.is_memory and not (bar.is_64bit and bar.is_prefetchable)
    ]
    return power_of_two(sum(others)) if others else 0


def large_bytes(slot: Iterable[PciDevice]) -> int:
    """The bytes of the window for some functions, without gaps."""
    return sum(_large(slot))


def _aligned(number: int, to: int) -> int:
    """Align upward."""
    return -(-number // to) * to


def power_of_two(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def memory_end(memory: int, hole: int, *, is_q35: bool = True, is_amd: bool = False) -> int:
    """The end of memory and start of the 64-bit hole, as in QEMU (pc_max_used_gpa).

    `is_amd` says that the guest has the AMD CPU of a host, with KVM.
    """
    above = memory - _BELOW_4G[is_q35] if memory >= _FITS_BELOW_4G[is_q35] else 0
    end = _aligned(4 * GIB + above, GIB)
    if is_amd and end + hole >= _AMD_RESERVED:
        return _aligned(_TIB + above, GIB)
    return end


def fitting_window(needed: int, bits: int | None, end_of_memory: Callable[[int], int]) -> int:
    """The window size: a power of two if it fits, otherwise the exact size.

    `end_of_memory` returns the end of memory for a given window size.

    Raises:
        NoRoom: there are too few addresses above the memory.
    """
    sizes = (power_of_two(needed), needed)
    ends = [_aligned(end_of_memory(each), 1 << (each.bit_length() - 1)) + each for each in sizes]
    for each, end in zip(sizes, ends, strict=True):
        if bits is None or end <= 1 << bits:
            return each
    raise NoRoom(ends[-1])


class NoRoom(Exception):  # noqa: N818 - an answer for callers here
    """A window that would end beyond the last address."""

    def __init__(self, end: int) -> None:
        super().__init__(end)
        self.end = end
