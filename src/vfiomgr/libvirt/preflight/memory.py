"""Rules about memory and NUMA: the lock limit, whether there is enough, and how far it is.

A guest with several cells learns the node of a device only from an expander with `<node>`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding, info, problem, warning
from vfiomgr.guests.memory import RESERVE, needed_lock
from vfiomgr.libvirt.model import EXPANDER, DomainHostdev, PciController
from vfiomgr.libvirt.preflight.context import ROOT_BUS, PreflightContext, shown_size, sysfs
from vfiomgr.passthrough.readiness_hints import diagnostics_to_bind, how_to_bind
from vfiomgr.units import format_cpulist
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.pci.memory import HugepagePool, NumaNode
    from vfiomgr.pci.model import PciDevice


_LOCKED = (
    'VFIO locks all guest memory: QEMU exits with "vfio_dma_map failed" or "Cannot allocate memory"'
)
_LIMITED = (
    "the limit covers everything that QEMU needs, not only guest memory: the kernel kills QEMU "
    "when it is reached"
)
_NODES = "/sys/devices/system/node"


def hard_limit(context: PreflightContext) -> Iterator[Diagnostic]:
    """The memory that libvirt lets QEMU lock (qemuDomainGetMemLockLimitBytes), unless limited."""
    domain = context.domain
    limit, memory = domain.memory.hard_limit_bytes, domain.memory.total_bytes
    if limit is None or context.is_session:
        return
    count = sum(hostdev.element != "disk" for hostdev in context.hostdevs)
    own = domain.own_mappings
    needed = needed_lock(memory, count, has_viommu=bool(domain.iommus), own_mappings=own)
    if limit >= needed:
        return
    is_fatal = context.takes_functions and limit < needed - RESERVE
    line = domain.line("memtune/hard_limit")
    several = f" for each of {count} devices, because the guest has an IOMMU"
    several = several if domain.iommus and count > 1 else ""
    several += f"; again for each NVMe disk and vDPA interface: {own}" if own else ""
    yield finding(
        "hard-limit-too-low",
        "blocker" if is_fatal else "warning",
        f"the domain may lock only {shown_size(limit)}, but needs {shown_size(needed)}",
        (
            f"{context.at(line)}: <hard_limit> of {shown_size(limit)}",
            f"{context.cite_memory()}{several}",
        ),
        _LOCKED if is_fatal else _LIMITED,
        f"remove <hard_limit> in line {line} (libvirt then computes it), or write <hard_limit "
        f"unit='KiB'>{needed // 1024}</hard_limit>",
    )


def balloon(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU inhibits the balloon of a guest with VFIO devices (ram_block_discard_disable)."""
    memory, line = context.domain.memory, context.domain.line("currentMemory")
    current = memory.current_bytes
    if current is None or current >= memory.total_bytes or not context.takes_functions:
        return
    yield info(
        "balloon",
        f"the balloon gives nothing back to the host: {shown_size(memory.total_bytes)} are pinned, "
        f"and the guest uses {shown_size(current)}",
        (f"{context.at(line)}: <currentMemory> of {shown_size(current)}", context.cite_memory()),
        "VFIO pins all memory of a guest at its start, for DMA of the device",
        f"write the same size into <memory> and <currentMemory> (line {line}), and <memballoon "
        "model='none'/>",
    )


def session(context: PreflightContext) -> Iterator[Diagnostic]:
    """Without CAP_SYS_RESOURCE libvirt cannot raise the limit: "cannot limit locked memory"."""
    hypervisor = context.hypervisor
    if hypervisor is None or not context.is_session or not context.takes_functions:
        return
    limits = context.host.readiness.memlock if context.host.readiness else None
    users = [limit for limit in limits or () if limit.kind == "user"]
    if any(limit.is_unlimited for limit in users):
        return
    yield warning(
        "session-memory-limit",
        "a libvirt session may lock no more memory than its user",
        (
            f"{hypervisor.uri}: a session, not the system daemon",
            *(f"{limit.source}: {limit.subject}: {limit.setting}" for limit in users),
            context.cite_memory(),
        ),
        "VFIO locks all guest memory, and the limit of a user is 8 MiB by default",
        "write `USER - memlock unlimited` into /etc/security/limits.d/vfio.conf and log in "
        "again; or define the domain with --connect qemu:///system",
    )


def session_tuning(context: PreflightContext) -> Iterator[Diagnostic]:
    """Libvirt: "Memory tuning is not available in session mode" (qemuValidateDomainDef)."""
    limit, line = context.domain.memory.hard_limit_bytes, context.domain.line("memtune/hard_limit")
    if limit is not None and context.hypervisor is not None and context.is_session:
        yield problem(
            "session-memtune",
            "a libvirt session rejects a domain with <hard_limit>",
            (f"{context.at(line)}: <hard_limit>", f"{context.hypervisor.uri}: a session"),
            "libvirt sets limits of memory through control groups, which a session cannot use",
            f"remove <memtune> in line {line}; LimitMEMLOCK of the service or the memlock limit of "
            "the user decides how much QEMU may lock",
        )


def session_managed(context: PreflightContext) -> Iterator[Diagnostic]:
    """A session's daemon may not write to a driver's bind and unbind."""
    hypervisor = context.hypervisor
    if hypervisor is None or not context.is_session:
        return
    for taken in context.waiting:
        if taken.hostdev.managed:
            refused = diagnostics_to_bind(context.host, [taken.device])
            bound = (
                how_to_bind(context.host, [taken.device])
                if refused
                else f"vfiomgr bind {taken.device.address} --owner USER as root"
            )
            yield problem(
                "session-managed",
                f"a libvirt session cannot bind {taken.device}",
                (context.cite_managed(taken.hostdev), f"{hypervisor.uri}: a session"),
                "only root can unbind a device from its driver",
                f"{bound}, and write managed='no' in line {taken.hostdev.line}",
                subject=taken.device,
            )


def hugepages(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU allocates huge pages when it starts: "unable to map backing store for guest RAM"."""
    memory = context.domain.memory
    nodes = _nodes(context)
    hook = context.domain.hook
    if not memory.has_hugepages or not nodes or _runs(context) or (hook and hook.hugepages):
        return
    known = context.host.topology and context.host.topology.default_page_bytes
    sizes = set(memory.hugepage_bytes) or ({known} if known else set())
    sizes = sizes or {p.page_bytes for n in nodes for p in n.hugepages}
    pools = [(n, p) for n in nodes for p in n.hugepages if p.page_bytes in sizes]
    free = sum(_free(node, sizes) for node in nodes)
    if free >= memory.total_bytes:
        return
    line = context.domain.line("memoryBacking/hugepages")
    yield problem(
        "hugepages-too-few",
        f"{context.guest} needs {shown_size(memory.total_bytes)} of huge pages, but only "
        f"{shown_size(free)} are free",
        (
            f"{context.at(line)}: <hugepages>",
            *(
                f"{_pool_directory(node, pool)}: {pool.free} of {pool.total} free"
                for node, pool in pools
            ),
        ),
        "QEMU allocates all huge pages when it starts, and exits if there are too few",
        _more_pages(context, pools, memory.total_bytes - free) + _other_node(context, sizes),
    )


def _free(node: NumaNode, sizes: Container[int]) -> int:
    return sum(pool.free * pool.page_bytes for pool in node.hugepages if pool.page_bytes in sizes)


def _other_node(context: PreflightContext, sizes: Container[int]) -> str:
    """The remedy to bind the memory to a node that has enough."""
    memory, topology = context.domain.memory, context.host.topology
    for node in topology.nodes if topology and memory.host_nodes and context.is_of_libvirt else ():
        if node.number not in memory.host_nodes and _free(node, sizes) >= memory.total_bytes:
            return f", or write another node into <numatune>: node {node.number} has enough"
    return ""


def _pool_directory(node: NumaNode, pool: HugepagePool) -> str:
    return f"{_NODES}/node{node.number}/hugepages/hugepages-{pool.page_bytes // 1024}kB"


def _more_pages(
    context: PreflightContext, pools: Sequence[tuple[NumaNode, HugepagePool]], lacking: int
) -> str:
    """The command that reserves the missing pages, on the first node and in its largest size."""
    without = context.fix("remove <hugepages>", "omit --hugepages")
    if not pools:
        return f"{without}: this kernel has no pool of that size"
    first = pools[0][0]
    pool = max((p for n, p in pools if n is first), key=lambda pool: pool.page_bytes)
    count = pool.total + -(-lacking // pool.page_bytes)
    return (
        f"echo {count} > {_pool_directory(first, pool)}/nr_hugepages, then read the file to see "
        f"how many were reserved; or {without}"
    )


def too_little(context: PreflightContext) -> Iterator[Diagnostic]:
    """VFIO locks all memory at the start, so it cannot be swapped or added later."""
    memory, nodes = context.domain.memory, _nodes(context)
    if memory.has_hugepages or not nodes or not context.takes_functions:
        return
    known = [n.memory_bytes for n in nodes if n.memory_bytes is not None]
    if len(known) < len(nodes):
        return
    total, free = sum(known), sum(n.free_bytes for n in nodes)
    is_fatal = memory.total_bytes >= total
    if not is_fatal and (memory.total_bytes <= free or _runs(context)):
        return
    names = ", ".join(f"node{node.number}" for node in nodes)
    verb = "has" if len(nodes) == 1 else "have"
    yield finding(
        "memory-too-little",
        "blocker" if is_fatal else "info",
        f"{context.guest} locks {shown_size(memory.total_bytes)}, but {names} {verb} only "
        f"{shown_size(total if is_fatal else free)}{'' if is_fatal else ' free now'}",
        (
            context.cite_memory(),
            *(
                f"{_NODES}/node{n.number}/meminfo: {shown_size(size)}"
                for n, size in zip(nodes, known, strict=True)
            ),
        ),
        "with a host device all guest memory is allocated and locked at the start"
        + ("" if is_fatal else ", and the kernel must first free its cache"),
        f"give {context.guest} less memory, or stop another guest"
        + (", or bind its memory to more nodes" if memory.host_nodes else ""),
    )


def _nodes(context: PreflightContext) -> tuple[NumaNode, ...]:
    """The host nodes that may provide the domain's memory."""
    topology = context.host.topology
    bound = context.domain.memory.host_nodes
    return tuple(n for n in (topology.nodes if topology else ()) if not bound or n.number in bound)


def _runs(context: PreflightContext) -> bool:
    """Whether it already has its memory."""
    return context.itself is not None and context.itself.is_active


def missing_node(context: PreflightContext) -> Iterator[Diagnostic]:
    """libvirt: "NUMA node N is unavailable"."""
    topology = context.host.topology
    if topology is None or not topology.nodes:
        return
    known = {node.number for node in topology.nodes}
    absent = sorted(context.domain.memory.host_nodes - known)
    if absent:
        line = context.domain.line("numatune/memory")
        yield problem(
            "numa-node-missing",
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
        yield warning(
            "far-memory",
            f"{context.guest}'s memory is bound to NUMA node {format_cpulist(bound)}, far from "
            "its devices",
            (
                f"{context.at(line)}: <numatune>",
                *(f"{sysfs(device)}/numa_node: {device.numa_node}" for device in far),
            ),
            "all memory accesses of these devices cross the link between the sockets",
            context.fix(f"write nodeset='{_nodes_of(far)}' in line {line}", "pass --numa strict"),
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
        numbers = {device.numa_node for device in far}
        near = {cpu for n in topology.nodes for cpu in n.cpus if n.number in numbers}
        line = context.domain.line("cputune")
        yield warning(
            "far-cpus",
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
    several = len({device.numa_node for device in near}) > 1
    expanders = (
        "; to show the guest which devices are near each other, give it NUMA cells, and put the "
        "devices on expander bridges (pcie-expander-bus) with a <node>"
    )
    yield info(
        "numa-unbound",
        f"the host has {len(nodes)} NUMA nodes, but {context.guest} is not bound to any",
        tuple(f"{sysfs(device)}/numa_node: {device.numa_node}" for device in near),
        "its memory and CPUs may be far from its devices, and placed differently at each start",
        context.fix(
            f"write <numatune><memory mode='strict' nodeset='{_nodes_of(near)}'/></numatune>, and "
            "pin its CPUs there, as vfiomgr libvirt domain does",
            "pass --numa strict, and pin the threads of its CPUs there with taskset",
        )
        + (expanders if several else ""),
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
    numbers = [c.bus_nr for c in context.domain.controllers if c.model == EXPANDER]
    lowest = min((number for number in numbers if number is not None), default=256)
    for node, devices in lost.items():
        cell = _cell_on(context, node)
        shown = "C" if cell is None else str(cell)
        meant = f" (C: the cell whose <memnode> is of node {node})" if cell is None else ""
        yield warning(
            "device-without-cell",
            "the guest has several NUMA nodes, but no node is set for "
            f"{', '.join(near.hostdev.name for near in devices)}",
            (
                *(context.cite(near.hostdev) for near in devices),
                *(near.where for near in devices),
                f"{context.at(context.domain.line('cpu'))}: cells in <numa> of <cpu>",
            ),
            "numa_node is -1 in the guest: CUDA and NCCL place buffers and threads on any node, "
            "often across the link between the sockets",
            # a number below those of all expanders, with a number for each port
            f"put {'them' if devices[1:] else 'it'} on root ports of an expander: <controller "
            f"type='pci' model='{EXPANDER}'><target busNr='{lowest - 1 - len(devices)}'>"
            f"<node>{shown}</node></target></controller>{meant}; vfiomgr libvirt domain writes "
            "such a domain",
        )


def elsewhere(context: PreflightContext) -> Iterator[Diagnostic]:
    """An expander that sets the wrong node for a device."""
    cells = dict(context.domain.memory.cell_nodes)
    wrong: dict[tuple[PciController, int], list[_Near]] = defaultdict(list)
    for near in _near_cells(context):
        bound = None if near.expander is None else cells.get(near.expander.numa_node or 0)
        if near.expander is not None and bound is not None and near.node not in bound:
            wrong[near.expander, near.node].append(near)
    for (expander, node), devices in wrong.items():
        own, cell = expander.numa_node or 0, _cell_on(context, node)
        names = ", ".join(near.hostdev.name for near in devices)
        fix = f"write nodeset='{node}' into <memnode cellid='{own}'>"
        if cell is not None:
            fix = f"write <node>{cell}</node> in line {expander.line}, or put it behind another "
            fix += "expander"
        yield warning(
            "device-of-other-cell",
            f"the guest places {names} near its cell {own}, whose memory is on host NUMA node "
            f"{format_cpulist(cells[own])}, but the device is on node {node}",
            (
                *(context.cite(near.hostdev) for near in devices),
                f"{context.at(expander.line)}: expander with <node>{own}</node>",
                *(near.where for near in devices),
            ),
            "memory that the guest chooses for the device is far from it",
            fix,
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
    pairs = [(taken.hostdev, taken.device) for taken in context.seen]
    for hostdev, vgpu in context.vgpus:
        parent = context.host.device_named(vgpu.parent)
        pairs += [] if parent is None else [(hostdev, parent)]
    for hostdev, device in pairs:
        node = device.numa_node
        if node is not None and node >= 0 and hostdev.acpi_nodes is None:
            root = context.controllers.get(context.root_of(hostdev.guest) or ROOT_BUS)
            has_node = root is not None and root.model == EXPANDER and root.numa_node is not None
            where = f"{sysfs(device)}/numa_node: {node}"
            yield _Near(hostdev, node, where, root if has_node else None)


def _cell_on(context: PreflightContext, node: int) -> int | None:
    """The guest cell whose memory comes from a host node."""
    cells = context.domain.memory.cell_nodes
    return next((cell for cell, nodes in cells if node in nodes), None)


def _near_some_node(context: PreflightContext) -> list[PciDevice]:
    """Functions to which the firmware assigned a node; -1 means unknown."""
    devices = (taken.device for taken in context.seen)
    return [d for d in devices if d.numa_node is not None and d.numa_node >= 0]


def _nodes_of(devices: list[PciDevice]) -> str:
    return format_cpulist({d.numa_node for d in devices if d.numa_node is not None})
