"""Rules about distance: devices against the memory and the CPUs that the domain is bound to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.model.numbers import write_numbers
from vfiomgr.model.readiness import Finding
from vfiomgr.planner.preflight.situation import sysfs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.model.pci import PciDevice
    from vfiomgr.planner.preflight.situation import Situation


def missing_node(situation: Situation) -> Iterator[Finding]:
    """libvirt: "NUMA node N is unavailable"."""
    topology = situation.host.topology
    if topology is None or not topology.nodes:
        return
    known = {node.number for node in topology.nodes}
    absent = sorted(situation.domain.memory.host_nodes - known)
    if absent:
        line = situation.domain.line("numatune/memory")
        yield Finding(
            "numa-node-missing",
            "blocker",
            f"the domain's memory is bound to NUMA node {write_numbers(absent)}, which this host "
            "does not have",
            (
                f"{situation.at(line)}: <numatune>",
                f"/sys/devices/system/node: node{write_numbers(known)}",
            ),
            "libvirt does not start it",
            f"write a node of this host in line {line}",
        )


def far_memory(situation: Situation) -> Iterator[Finding]:
    """A device that reaches all of its guest's memory across the link between sockets."""
    bound = situation.domain.memory.host_nodes
    far = [d for d in _near_some_node(situation) if bound and d.numa_node not in bound]
    if far:
        line = situation.domain.line("numatune/memory")
        yield Finding(
            "far-memory",
            "warning",
            f"the domain's memory is bound to NUMA node {write_numbers(bound)}, and its devices "
            "are elsewhere",
            (
                f"{situation.at(line)}: <numatune>",
                *(f"{sysfs(device)}/numa_node: {device.numa_node}" for device in far),
            ),
            "all that these devices read and write crosses the link between the sockets",
            f"write nodeset='{_nodes_of(far)}' in line {line}",
        )


def far_cpus(situation: Situation) -> Iterator[Finding]:
    """Virtual CPUs of which none is near a device."""
    topology = situation.host.topology
    pinned = frozenset[int]().union(*(cpus for _, cpus in situation.domain.cpu.pins))
    if topology is None or not pinned:
        return
    far = []
    for device in _near_some_node(situation):
        node = topology.node(device.numa_node)
        if node is not None and node.cpus and pinned.isdisjoint(node.cpus):
            far.append(device)
    if far:
        near = {cpu for n in topology.nodes for cpu in n.cpus if n.number in _numbers(far)}
        line = situation.domain.line("cputune")
        yield Finding(
            "far-cpus",
            "warning",
            f"the domain is pinned to CPUs {write_numbers(pinned)}, and none is near its devices",
            (
                f"{situation.at(line)}: <cputune>",
                *(f"{sysfs(device)}/numa_node: {device.numa_node}" for device in far),
                f"/sys/devices/system/node/node{_nodes_of(far)}/cpulist: {write_numbers(near)}",
            ),
            "interrupts and buffers of these devices cross the link between the sockets",
            f"pin its CPUs to some of {write_numbers(near)}",
        )


def unbound(situation: Situation) -> Iterator[Finding]:
    """A host of several nodes, and a domain that says nothing of them."""
    topology = situation.host.topology
    nodes = [n for n in (topology.nodes if topology else ()) if n.memory_bytes]
    near = _near_some_node(situation)
    is_bound = situation.domain.memory.host_nodes or situation.domain.cpu.pins
    if len(nodes) < 2 or not near or is_bound:  # noqa: PLR2004 - several nodes
        return
    yield Finding(
        "numa-unbound",
        "info",
        f"the host has {len(nodes)} NUMA nodes, and the domain is bound to none",
        tuple(f"{sysfs(device)}/numa_node: {device.numa_node}" for device in near),
        "its memory and CPUs may be far from its devices, and elsewhere at each start",
        f"write <numatune><memory mode='strict' nodeset='{_nodes_of(near)}'/></numatune>, and pin "
        "its CPUs there; vfiomgr libvirt domain does both",
    )


def _near_some_node(situation: Situation) -> list[PciDevice]:
    """Its functions that the firmware gave a node; -1 says nothing."""
    devices = (taken.device for taken in situation.functions)
    return [d for d in devices if d.numa_node is not None and d.numa_node >= 0]


def _numbers(devices: list[PciDevice]) -> set[int]:
    return {d.numa_node for d in devices if d.numa_node is not None}


def _nodes_of(devices: list[PciDevice]) -> str:
    return write_numbers(_numbers(devices))
