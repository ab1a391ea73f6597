"""The cores of the host: the CPUs that are threads of one, and those that share a cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.pci.memory import CPUS, HostTopology
from vfiomgr.units import parse_cpulist

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

Sets = tuple[tuple[int, ...], ...]
_THREADS = "topology/thread_siblings_list"
_CACHE = "cache/index3/shared_cpu_list"
"""Of the third level; some CPUs have none (Documentation/ABI/testing/sysfs-devices-system-cpu)."""


def read_cores(tree: HostTree) -> tuple[Sets, Sets]:
    """The threads of each core, and the CPUs of each third-level cache; only online CPUs."""
    online = parse_cpulist(tree.read(CPUS / "online"))
    return tuple(_sets(tree, online, _THREADS)), tuple(_sets(tree, online, _CACHE))


def _sets(tree: HostTree, online: tuple[int, ...], name: str) -> Iterator[tuple[int, ...]]:
    """Each set once: it is read from its first CPU."""
    seen: set[int] = set()
    for cpu in online:
        if cpu in seen:
            continue
        found = parse_cpulist(tree.read(CPUS / f"cpu{cpu}/{name}"))
        seen.update(found)
        if found:
            yield tuple(one for one in found if one in online)


def unpinned(topology: HostTopology, pinned: set[int]) -> tuple[int, ...]:
    """The CPUs that the scheduler uses for other threads."""
    kept = {cpu for node in topology.nodes for cpu in node.cpus}
    kept |= {cpu for core in topology.cores for cpu in core}
    return tuple(sorted(kept - pinned - set(topology.isolated_cpus)))
