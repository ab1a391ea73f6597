"""NUMA nodes and processors: /sys/devices/system (Documentation/ABI/stable/sysfs-devices-node)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.model.numa import HostTopology, HugepagePool, NumaNode
from vfiomgr.model.numbers import parse_numbers
from vfiomgr.model.path import HostPath

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

NODES = HostPath("/sys/devices/system/node")
CPUS = HostPath("/sys/devices/system/cpu")
_NODE = re.compile(r"node(\d+)")
_POOL = re.compile(r"hugepages-(\d+)kB")
_MEMORY = re.compile(r"Node \d+ ([\w()]+): +(\d+) kB")
_KIB = 1024
_GIVEN_UP = ("MemFree", "Inactive(file)", "SReclaimable")
"""What a node can give: as MemAvailable of the whole host counts, which no node has."""


def read_topology(tree: HostTree) -> HostTopology:
    """The nodes with what is free on them now, and what concerns processors."""
    names = filter(None, map(_NODE.fullmatch, tree.children(NODES)))
    online = parse_numbers(tree.read(CPUS / "online"))
    nodes = [_read_node(tree, int(match[1]), frozenset(online)) for match in names]
    threads = tree.read(CPUS / "cpu0/topology/thread_siblings_list")
    return HostTopology(
        nodes=tuple(sorted(nodes, key=lambda node: node.number)),
        boot_cpu_threads=parse_numbers(threads),
        isolated_cpus=parse_numbers(tree.read(CPUS / "isolated")),
    )


def _read_node(tree: HostTree, number: int, online: frozenset[int]) -> NumaNode:
    directory = NODES / f"node{number}"
    memory = dict(_MEMORY.findall(tree.read(directory / "meminfo") or ""))
    cpus = parse_numbers(tree.read(directory / "cpulist"))
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
