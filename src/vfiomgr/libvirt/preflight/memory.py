"""Rules about memory: what may be locked, whether there is enough, and where it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.libvirt.build.limits import RESERVE, needed_lock
from vfiomgr.libvirt.preflight.context import shown_size
from vfiomgr.passthrough.readiness_hints import diagnostics_to_bind, how_to_bind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.libvirt.preflight.context import PreflightContext
    from vfiomgr.pci.numa import NumaNode

_SESSION = "/session"
_LOCKED = (
    'VFIO locks all of a guest\'s memory: QEMU ends with "vfio_dma_map failed" or "Cannot allocate '
    'memory"'
)
_LIMITED = (
    "the limit holds for all that QEMU needs, not for the guest's memory alone: the kernel ends "
    "QEMU when it is reached"
)
_NODES = "/sys/devices/system/node"


def hard_limit(context: PreflightContext) -> Iterator[Diagnostic]:
    """What libvirt lets QEMU lock (qemuDomainGetMemLockLimitBytes), unless the domain says less."""
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
    several = f" for each of {count} devices, since the guest has an IOMMU"
    several = several if domain.iommu is not None and count > 1 else ""
    several += f"; once more for each NVMe disk and vDPA interface: {own}" if own else ""
    yield finding(
        "hard-limit-too-low",
        "blocker" if is_fatal else "warning",
        f"the domain may lock {shown_size(limit)}, and needs {shown_size(needed)}",
        (
            f"{context.at(line)}: <hard_limit> of {shown_size(limit)}",
            f"{context.cite_memory()}{several}",
        ),
        _LOCKED if is_fatal else _LIMITED,
        f"take <hard_limit> out of line {line}, which has libvirt compute it, or write "
        f"<hard_limit unit='KiB'>{needed // 1024}</hard_limit>",
    )


def session(context: PreflightContext) -> Iterator[Diagnostic]:
    """Without CAP_SYS_RESOURCE libvirt raises no limit: "cannot limit locked memory"."""
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
        "a session of libvirt may lock no more memory than its user",
        (
            f"{hypervisor.uri}: a session, not the system's daemon",
            *(f"{limit.source}: {limit.subject}: {limit.setting}" for limit in users),
            context.cite_memory(),
        ),
        "VFIO locks all of a guest's memory, and a user's limit is 8 MiB where nobody raised it",
        "write `USER - memlock unlimited` into /etc/security/limits.d/vfio.conf and log in anew; "
        "or define the domain with --connect qemu:///system",
    )


def session_managed(context: PreflightContext) -> Iterator[Diagnostic]:
    """A session's daemon has no right to write to a driver's bind and unbind."""
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
                f"a session of libvirt cannot bind {taken.device}",
                (context.cite_managed(taken.hostdev), f"{hypervisor.uri}: a session"),
                "only root takes a device from its driver",
                f"{bound}, and write managed='no' in line {taken.hostdev.line}",
                subject=taken.device,
            )


def hugepages(context: PreflightContext) -> Iterator[Diagnostic]:
    """QEMU reserves them as it starts: "unable to map backing store for guest RAM"."""
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
        f"the domain wants {shown_size(memory.total_bytes)} of huge pages, and "
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
        "QEMU takes all of its huge pages as it starts, and ends where there are too few",
        _more_pages(context, sizes),
    )


def _free(node: NumaNode, size: int) -> int:
    pool = node.pool(size)
    return pool.free * size if pool else 0


def _more_pages(context: PreflightContext, sizes: set[int]) -> str:
    """What reserves those that are lacking, on the first of the nodes, in its largest pages."""
    total = context.domain.memory.total_bytes
    pools = [(n, p) for n in _nodes(context) for p in n.hugepages if p.page_bytes in sizes]
    if not pools:
        return "take <hugepages> out: this kernel has no pool of that size"
    lacking = total - sum(pool.free * pool.page_bytes for _, pool in pools)
    first = pools[0][0]
    pool = max((p for n, p in pools if n is first), key=lambda pool: pool.page_bytes)
    count = pool.total + -(-lacking // pool.page_bytes)
    place = f"{_NODES}/node{first.number}/hugepages/hugepages-{pool.page_bytes // 1024}kB"
    return (
        f"echo {count} > {place}/nr_hugepages, and look there how many came; or take <hugepages> "
        "out"
    )


def too_little(context: PreflightContext) -> Iterator[Diagnostic]:
    """VFIO locks all memory at the start: none of it can be swapped or come later."""
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
        f"the domain locks {shown_size(memory.total_bytes)}, and {names} {verb} "
        f"{shown_size(total if is_fatal else free)}{'' if is_fatal else ' free now'}",
        (
            context.cite_memory(),
            *(f"{_NODES}/node{n.number}/meminfo: {shown_size(n.memory_bytes)}" for n in nodes),
        ),
        "with a device of the host all of a guest's memory is taken and locked as it starts"
        + ("" if is_fatal else ", and the kernel has to give up its cache for it first"),
        "give the domain less memory, or end another guest"
        + (", or bind its memory to more nodes" if memory.host_nodes else ""),
    )


def _nodes(context: PreflightContext) -> tuple[NumaNode, ...]:
    """The nodes of the host that the domain's memory may come from."""
    topology = context.host.topology
    bound = context.domain.memory.host_nodes
    return tuple(n for n in (topology.nodes if topology else ()) if not bound or n.number in bound)


def _runs(context: PreflightContext) -> bool:
    """Whether it has its memory already."""
    return context.itself is not None and context.itself.is_active
