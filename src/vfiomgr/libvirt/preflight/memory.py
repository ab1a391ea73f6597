"""Rules about memory: the lock limit, whether there is enough, and where it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.libvirt.build.limits import RESERVE, needed_lock
from vfiomgr.libvirt.preflight.context import shown_size
from vfiomgr.passthrough.readiness_hints import diagnostics_to_bind, how_to_bind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.libvirt.preflight.context import PreflightContext
    from vfiomgr.pci.memory import NumaNode

_SESSION = "/session"
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
    if limit is None:
        return
    count = sum(hostdev.element != "disk" for hostdev in context.hostdevs)
    own = domain.own_mappings
    needed = needed_lock(memory, count, has_viommu=domain.iommu is not None, own_mappings=own)
    if limit >= needed:
        return
    is_fatal = context.takes_functions and limit < needed - RESERVE
    line = domain.line("memtune/hard_limit")
    several = f" for each of {count} devices, because the guest has an IOMMU"
    several = several if domain.iommu is not None and count > 1 else ""
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


def session(context: PreflightContext) -> Iterator[Diagnostic]:
    """Without CAP_SYS_RESOURCE libvirt cannot raise the limit: "cannot limit locked memory"."""
    hypervisor = context.hypervisor
    if hypervisor is None or _SESSION not in hypervisor.uri or not context.takes_functions:
        return
    limits = context.host.readiness.memlock if context.host.readiness else None
    users = [limit for limit in limits or () if limit.kind == "user"]
    if any(limit.is_unlimited for limit in users):
        return
    yield finding(
        "session-memory-limit",
        "warning",
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


def session_managed(context: PreflightContext) -> Iterator[Diagnostic]:
    """A session's daemon may not write to a driver's bind and unbind."""
    hypervisor = context.hypervisor
    if hypervisor is None or _SESSION not in hypervisor.uri:
        return
    for taken in context.waiting:
        if taken.hostdev.managed:
            refused = diagnostics_to_bind(context.host, [taken.device])
            bound = (
                how_to_bind(context.host, [taken.device])
                if refused
                else f"vfiomgr bind {taken.device.address} --owner USER as root"
            )
            yield finding(
                "session-managed",
                "blocker",
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
    if not memory.has_hugepages or not nodes or _runs(context):
        return
    sizes = set(memory.hugepage_bytes) or {p.page_bytes for n in nodes for p in n.hugepages}
    free = {size: sum(_free(node, size) for node in nodes) for size in sorted(sizes)}
    if sum(free.values()) >= memory.total_bytes:
        return
    line = context.domain.line("memoryBacking/hugepages")
    yield finding(
        "hugepages-too-few",
        "blocker",
        f"the domain needs {shown_size(memory.total_bytes)} of huge pages, but only "
        f"{shown_size(sum(free.values()))} are free",
        (
            f"{context.at(line)}: <hugepages>",
            *(
                f"{_NODES}/node{node.number}/hugepages/hugepages-{pool.page_bytes // 1024}kB: "
                f"{pool.free} of {pool.total} free"
                for node in nodes
                for pool in node.hugepages
                if pool.page_bytes in sizes
            ),
        ),
        "QEMU allocates all huge pages when it starts, and exits if there are too few",
        _more_pages(context, sizes),
    )


def _free(node: NumaNode, size: int) -> int:
    pool = node.pool(size)
    return pool.free * size if pool else 0


def _more_pages(context: PreflightContext, sizes: set[int]) -> str:
    """The command that reserves the missing pages, on the first node and in its largest size."""
    total = context.domain.memory.total_bytes
    pools = [(n, p) for n in _nodes(context) for p in n.hugepages if p.page_bytes in sizes]
    if not pools:
        return "remove <hugepages>: this kernel has no pool of that size"
    lacking = total - sum(pool.free * pool.page_bytes for _, pool in pools)
    first = pools[0][0]
    pool = max((p for n, p in pools if n is first), key=lambda pool: pool.page_bytes)
    count = pool.total + -(-lacking // pool.page_bytes)
    place = f"{_NODES}/node{first.number}/hugepages/hugepages-{pool.page_bytes // 1024}kB"
    return (
        f"echo {count} > {place}/nr_hugepages, then read the file to see how many were reserved; "
        "or remove <hugepages>"
    )


def too_little(context: PreflightContext) -> Iterator[Diagnostic]:
    """VFIO locks all memory at the start, so it cannot be swapped or added later."""
    memory, nodes = context.domain.memory, _nodes(context)
    if memory.has_hugepages or not nodes or not context.takes_functions:
        return
    total, free = sum(n.memory_bytes for n in nodes), sum(n.free_bytes for n in nodes)
    is_fatal = memory.total_bytes >= total
    if not is_fatal and (memory.total_bytes <= free or _runs(context)):
        return
    names = ", ".join(f"node{node.number}" for node in nodes)
    verb = "has" if len(nodes) == 1 else "have"
    yield finding(
        "memory-too-little",
        "blocker" if is_fatal else "info",
        f"the domain locks {shown_size(memory.total_bytes)}, but {names} {verb} only "
        f"{shown_size(total if is_fatal else free)}{'' if is_fatal else ' free now'}",
        (
            context.cite_memory(),
            *(f"{_NODES}/node{n.number}/meminfo: {shown_size(n.memory_bytes)}" for n in nodes),
        ),
        "with a host device all guest memory is allocated and locked at the start"
        + ("" if is_fatal else ", and the kernel must first free its cache"),
        "give the domain less memory, or stop another guest"
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
