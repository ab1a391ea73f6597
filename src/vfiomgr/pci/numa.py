"""NUMA nodes and CPUs of a host, for the memory and CPUs of guests."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.paths import HostPath
from vfiomgr.units import parse_cpulist
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


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
    memory_bytes: int
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

    def node(self, number: int | None) -> NumaNode | None:
        """The node with this number."""
        return next((node for node in self.nodes if node.number == number), None)


NODES = HostPath("/sys/devices/system/node")
CPUS = HostPath("/sys/devices/system/cpu")
_NODE = re.compile(r"node(\d+)")
_POOL = re.compile(r"hugepages-(\d+)kB")
_MEMORY = re.compile(r"Node \d+ ([\w()]+): +(\d+) kB")
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
    )


def _read_node(tree: HostTree, number: int, online: frozenset[int]) -> NumaNode:
    directory = NODES / f"node{number}"
    memory = dict(_MEMORY.findall(tree.read(directory / "meminfo") or ""))
    cpus = parse_cpulist(tree.read(directory / "cpulist"))
    distances = tree.read(directory / "distance") or ""
    return NumaNode(
        number=number,
        cpus=tuple(cpu for cpu in cpus if not online or cpu in online),
        memory_bytes=int(memory.get("MemTotal", 0)) * _KIB,
        free_bytes=sum(int(memory.get(name, 0)) for name in _GIVEN_UP) * _KIB,
        hugepages=_read_pools(tree, directory / "hugepages"),
        distances=tuple(map(int, filter(str.isdecimal, distances.split()))),
    )


def _read_pools(tree: HostTree, directory: HostPath) -> tuple[HugepagePool, ...]:
    matches = filter(None, map(_POOL.fullmatch, tree.children(directory)))
    pools = (
        HugepagePool(
            page_bytes=int(match[1]) * _KIB,
            total=_number(tree.read(directory / match[0] / "nr_hugepages")),
            free=_number(tree.read(directory / match[0] / "free_hugepages")),
        )
        for match in matches
    )
    return tuple(sorted(pools, key=lambda pool: pool.page_bytes))


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
