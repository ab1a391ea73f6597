"""Rules about NUMA: devices, and the memory and CPUs that the domain is bound to.

A guest with several cells learns the node of a device only from an expander with `<node>`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.libvirt.model import EXPANDER, DomainHostdev, PciController
from vfiomgr.libvirt.preflight.context import sysfs
from vfiomgr.libvirt.preflight.presence import seen
from vfiomgr.units import format_cpulist
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.libvirt.model import GuestAddress
    from vfiomgr.libvirt.preflight.context import PreflightContext
    from vfiomgr.pci.model import PciDevice


def missing_node(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "NUMA node N is unavailable"."""
    topology = context.host.topology
    if topology is None or not topology.nodes:
        return
    known = {node.number for node in topology.nodes}
    absent = sorted(context.domain.memory.host_nodes - known)
    if absent:
        line = context.domain.line("numatune/memory")
        yield finding(
            "numa-node-missing",
            "blocker",
            f"the domain's memory is bound to NUMA node {format_cpulist(absent)}, which does not "
            "exist",
            (
                f"{context.at(line)}: <numatune>",
                f"/sys/devices/system/node: node{format_cpulist(known)}",
            ),
            "libvirt does not start the domain",
            f"write an existing node in line {line}",
        )


def far_memory(context: PreflightContext) -> Iterator[Diagnostic]:
    """All memory accesses of the device cross the link between sockets."""
    bound = context.domain.memory.host_nodes
    far = [d for d in _near_some_node(context) if bound and d.numa_node not in bound]
    if far:
        line = context.domain.line("numatune/memory")
        yield finding(
            "far-memory",
            "warning",
            f"the domain's memory is bound to NUMA node {format_cpulist(bound)}, far from its "
            "devices",
            (
                f"{context.at(line)}: <numatune>",
                *(f"{sysfs(device)}/numa_node: {device.numa_node}" for device in far),
            ),
            "all memory accesses of these devices cross the link between the sockets",
            f"write nodeset='{_nodes_of(far)}' in line {line}",
        )


def far_cpus(context: PreflightContext) -> Iterator[Diagnostic]:
    """All vCPUs are far from a device."""
    topology = context.host.topology
    pinned = frozenset[int]().union(*(cpus for _, cpus in context.domain.cpu.pins))
    if topology is None or not pinned:
        return
    far = []
    for device in _near_some_node(context):
        node = topology.node(device.numa_node)
        if node is not None and node.cpus and pinned.isdisjoint(node.cpus):
            far.append(device)
    if far:
        near = {cpu for n in topology.nodes for cpu in n.cpus if n.number in _numbers(far)}
        line = context.domain.line("cputune")
        yield finding(
            "far-cpus",
            "warning",
            f"the domain is pinned to CPUs {format_cpulist(pinned)}, far from its devices",
            (
                f"{context.at(line)}: <cputune>",
                *(f"{sysfs(device)}/numa_node: {device.numa_node}" for device in far),
                f"/sys/devices/system/node/node{_nodes_of(far)}/cpulist: {format_cpulist(near)}",
            ),
            "interrupts and buffers of these devices cross the link between the sockets",
            f"pin its CPUs to CPUs {format_cpulist(near)}",
        )


def unbound(context: PreflightContext) -> Iterator[Diagnostic]:
    """The host has several nodes, and the domain is bound to none of them."""
    topology = context.host.topology
    nodes = [n for n in (topology.nodes if topology else ()) if n.memory_bytes]
    near = _near_some_node(context)
    is_bound = context.domain.memory.host_nodes or context.domain.cpu.pins
    if len(nodes) < 2 or not near or is_bound:  # noqa: PLR2004 - several nodes
        return
    yield finding(
        "numa-unbound",
        "info",
        f"the host has {len(nodes)} NUMA nodes, but the domain is not bound to any",
        tuple(f"{sysfs(device)}/numa_node: {device.numa_node}" for device in near),
        "its memory and CPUs may be far from its devices, and placed differently at each start",
        f"write <numatune><memory mode='strict' nodeset='{_nodes_of(near)}'/></numatune>, and "
        "pin its CPUs there, as vfiomgr libvirt domain does",
    )


class _Near(Value):
    """A device of a guest with several cells: its host node, and what it is behind."""

    hostdev: DomainHostdev
    node: int
    where: str
    """The fact of the host, as evidence."""
    expander: PciController | None
    """The expander that sets the node in the guest; None if the guest reads -1."""


def without_cell(context: PreflightContext) -> Iterator[Diagnostic]:
    """The guest reads numa_node -1 for devices not below an expander with a node (_PXM in ACPI)."""
    lost: dict[int, list[_Near]] = defaultdict(list)
    for near in _near_cells(context):
        if near.expander is None:
            lost[near.node].append(near)
    for node, devices in lost.items():
        cell = _cell_on(context, node)
        told = "C" if cell is None else str(cell)
        meant = f" (C: the cell whose <memnode> is of node {node})" if cell is None else ""
        yield finding(
            "device-without-cell",
            "warning",
            "the guest has several NUMA nodes, but no node is set for "
            f"{', '.join(near.hostdev.name for near in devices)}",
            (
                *(context.cite(near.hostdev) for near in devices),
                *(near.where for near in devices),
                f"{context.at(context.domain.line('cpu'))}: cells in <numa> of <cpu>",
            ),
            "numa_node is -1 in the guest: CUDA and NCCL place buffers and threads on any node, "
            "often across the link between the sockets",
            f"put {'them' if devices[1:] else 'it'} on root ports of an expander: <controller "
            f"type='pci' model='{EXPANDER}'><target busNr='{_free_number(context, devices)}'>"
            f"<node>{told}</node></target></controller>{meant}; vfiomgr libvirt domain writes "
            "such a domain",
        )


def elsewhere(context: PreflightContext) -> Iterator[Diagnostic]:
    """An expander that sets the wrong node for a device."""
    cells = dict(context.domain.memory.cell_nodes)
    wrong: dict[tuple[PciController, int], list[_Near]] = defaultdict(list)
    for near in _near_cells(context):
        if near.expander is not None and _is_far(near.node, cells.get(_cell(near.expander))):
            wrong[near.expander, near.node].append(near)
    for (expander, node), devices in wrong.items():
        told, cell = _cell(expander), _cell_on(context, node)
        names = ", ".join(near.hostdev.name for near in devices)
        yield finding(
            "device-of-other-cell",
            "warning",
            f"the guest places {names} near its cell {told}, whose memory is on host NUMA node "
            f"{format_cpulist(cells[told])}, but the device is on node {node}",
            (
                *(context.cite(near.hostdev) for near in devices),
                f"{context.at(expander.line)}: expander with <node>{told}</node>",
                *(near.where for near in devices),
            ),
            "memory that the guest chooses for the device is far from it",
            f"write nodeset='{node}' into <memnode cellid='{told}'>"
            if cell is None
            else f"write <node>{cell}</node> in line {expander.line}, or put it behind another "
            "expander",
        )


def _near_cells(context: PreflightContext) -> Iterator[_Near]:
    """The devices of a guest with several cells that may be on several host nodes.

    `<acpi nodeset>` gives a device its own cells.
    """
    topology = context.host.topology
    cells = [cell for cell in context.domain.cpu.cells if cell.memory_bytes or cell.cpus]
    is_split = topology is not None and len(topology.nodes) > 1 and len(cells) > 1
    if not is_split or len(context.domain.memory.host_nodes) == 1:
        return
    for hostdev, node, where in _nodes_of_hostdevs(context):
        if node is not None and node >= 0 and hostdev.acpi_nodes is None:
            yield _Near(hostdev, node, where, _expander_above(context, hostdev.guest))


def _nodes_of_hostdevs(
    context: PreflightContext,
) -> Iterator[tuple[DomainHostdev, int | None, str]]:
    for taken in seen(context):
        node = taken.device.numa_node
        yield taken.hostdev, node, f"{sysfs(taken.device)}/numa_node: {node}"
    for hostdev, vgpu in context.vgpus:
        parent = context.host.device_named(vgpu.parent)
        if parent is not None:
            yield hostdev, parent.numa_node, f"{sysfs(parent)}/numa_node: {parent.numa_node}"


def _expander_above(context: PreflightContext, guest: GuestAddress | None) -> PciController | None:
    """The expander with a node above a place; libvirt places nothing there by default."""
    seen: set[int] = set()
    while guest is not None and guest.bus not in seen:
        seen.add(guest.bus)
        controller = context.controllers.get(guest.bus)
        if controller is None:
            return None
        if controller.model == EXPANDER:
            return controller if controller.numa_node is not None else None
        guest = controller.guest
    return None


def _cell(expander: PciController) -> int:
    """The cell set by an expander with a node."""
    return expander.numa_node or 0


def _is_far(node: int, bound: frozenset[int] | None) -> bool:
    """Whether memory is bound, but not to that node."""
    return bound is not None and node not in bound


def _cell_on(context: PreflightContext, node: int) -> int | None:
    """The guest cell whose memory comes from a host node."""
    cells = context.domain.memory.cell_nodes
    return next((cell for cell, nodes in cells if node in nodes), None)


def _free_number(context: PreflightContext, devices: list[_Near]) -> int:
    """A number below those of all expanders, with a number for each port."""
    taken = (c.bus_nr for c in context.domain.controllers if c.model == EXPANDER)
    return min((number for number in taken if number is not None), default=256) - 1 - len(devices)


def _near_some_node(context: PreflightContext) -> list[PciDevice]:
    """Functions to which the firmware assigned a node; -1 means unknown."""
    devices = (taken.device for taken in seen(context))
    return [d for d in devices if d.numa_node is not None and d.numa_node >= 0]


def _numbers(devices: list[PciDevice]) -> set[int]:
    return {d.numa_node for d in devices if d.numa_node is not None}


def _nodes_of(devices: list[PciDevice]) -> str:
    return format_cpulist(_numbers(devices))
