"""NUMA nodes and processors of a host: where a guest's memory and CPUs can lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class HugepagePool:
    """The huge pages of one size on a node: how many there are, and how many nobody has."""

    page_bytes: int
    total: int
    free: int


@dataclass(frozen=True, slots=True)
class NumaNode:
    """`/sys/devices/system/node/node<number>`; one without CPUs or without memory is a node too."""

    number: int
    cpus: tuple[int, ...]
    """Those that are online."""
    memory_bytes: int
    free_bytes: int
    """Unused pages, and those that the page cache gives up."""
    hugepages: tuple[HugepagePool, ...] = ()
    distances: tuple[int, ...] = ()
    """To the nodes that are online, by their numbers; 10 to itself (ACPI's SLIT)."""

    def pool(self, page_bytes: int) -> HugepagePool | None:
        """The pages of a size."""
        return next((pool for pool in self.hugepages if pool.page_bytes == page_bytes), None)


@dataclass(frozen=True, slots=True)
class HostTopology:
    """Nodes and processors of a host."""

    nodes: tuple[NumaNode, ...]
    """Sorted by number; empty where the kernel has no NUMA."""
    boot_cpu_threads: tuple[int, ...] = ()
    """The threads of the core of CPU 0, which serves the host's own interrupts and timers."""
    isolated_cpus: tuple[int, ...] = ()
    """Between which the scheduler moves no thread (isolcpus=)."""

    def node(self, number: int | None) -> NumaNode | None:
        """The node of a number."""
        return next((node for node in self.nodes if node.number == number), None)


PARTS: tuple[Any, ...] = (HostTopology, NumaNode, HugepagePool)
"""The values that a snapshot holds."""
