"""Give each virtual CPU a CPU of the host: entire cores, of as few third-level caches as possible.

The guest sees the threads of a core as such, so its scheduler knows which share one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.guests.model import GuestRequest, Reason
from vfiomgr.pci.cores import unpinned
from vfiomgr.units import counted, format_cpulist
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.guests.numa import Nodes
    from vfiomgr.pci.memory import HostTopology

Core = tuple[int, ...]
_HOST_CORES = 2
"""Cores that a desktop needs for itself, QEMU's own threads and Looking Glass's client."""


class _Share(Value):
    """Virtual CPUs, and the cores of the host that they may have."""

    vcpus: tuple[int, ...]
    cores: tuple[Core, ...]


def with_own_cpus(nodes: Nodes, topology: HostTopology | None, request: GuestRequest) -> Nodes:
    """The same nodes, with a CPU of the host for each virtual CPU, if that was asked for."""
    if not request.has_own_cpus:
        return nodes
    if topology is None or not topology.cores:
        return _without(nodes, "the cores of the host are unknown: no vCPU gets a CPU of its own")
    shares = _shares(nodes, topology, request)
    threads = _common_threads(shares)
    chosen = [_chosen(share, topology, threads) for share in shares]
    if any(cores is None for cores in chosen):
        most = sum(map(len, chain.from_iterable(share.cores for share in shares)))
        text = f"{request.vcpus} vCPUs cannot have CPUs of their own: pass at most --vcpus {most}"
        return _without(nodes, f"{text}, which leaves the core of CPU 0 to the host")
    pins = [
        (vcpu, (cpu,))
        for share, cores in zip(shares, chosen, strict=True)
        for vcpu, cpu in zip(share.vcpus, chain.from_iterable(cores or ()), strict=False)
    ]
    pinned = {cpu for _, cpus in pins for cpu in cpus}
    left = unpinned(topology, pinned)
    reasons = [one for one in nodes.reasons if one.part != "pins"]
    return replace(
        nodes,
        pins=tuple(pins),
        emulator=left,
        threads=threads,
        reasons=(*reasons, Reason("pins", _why(topology, pinned, left))),
        notes=(*nodes.notes, *_notes(topology, pinned, left)),
    )


def _without(nodes: Nodes, note: str) -> Nodes:
    return replace(nodes, notes=(*nodes.notes, note))


def _shares(nodes: Nodes, topology: HostTopology, request: GuestRequest) -> tuple[_Share, ...]:
    """The cores of each node of the guest, without that of CPU 0; all without nodes."""
    usable = [core for core in topology.cores if not set(core) & {0, *topology.boot_cpu_threads}]
    if not nodes.shares:
        return (_Share(tuple(range(request.vcpus)), tuple(usable)),)
    return tuple(
        _Share(share.vcpus, tuple(core for core in usable if set(core) <= set(share.node.cpus)))
        for share in nodes.shares
        if share.vcpus
    )


def _common_threads(shares: Sequence[_Share]) -> int:
    """The threads of a core of the guest: those of the host's cores if there are enough such."""
    most = max((len(core) for share in shares for core in share.cores), default=1)
    for share in shares:
        fitting = sum(len(core) == most for core in share.cores)
        if len(share.vcpus) % most or len(share.vcpus) // most > fitting:
            return 1
    return most


def _chosen(share: _Share, topology: HostTopology, threads: int) -> tuple[Core, ...] | None:
    """The cores for some virtual CPUs; None if there are too few.

    A cache that CPU 0 does not use is preferred: the host's own threads need one too.
    Without equal threads, those with most come first: they are the faster ones of hybrid CPUs.
    """
    most = max(map(len, share.cores), default=1)
    fast = [core for core in share.cores if len(core) == most]
    usable = share.cores if threads == 1 and sum(map(len, fast)) < len(share.vcpus) else fast
    groups = _by_cache(usable, topology)
    wanted = len(share.vcpus)
    fitting = [group for group in groups if sum(map(len, group)) >= wanted]
    of_host = next((set(cache) for cache in topology.caches if 0 in cache), set[int]())
    best = min(fitting, key=lambda one: (one[0][0] in of_host, _size(one), one[0]), default=None)
    ordered = best or tuple(chain.from_iterable(sorted(groups, key=_size, reverse=True)))
    taken: list[Core] = []
    for core in ordered:
        if sum(map(len, taken)) < wanted:
            taken.append(core)
    return tuple(taken) if sum(map(len, taken)) >= wanted else None


def _size(group: Iterable[Core]) -> int:
    return sum(map(len, group))


def _by_cache(cores: Iterable[Core], topology: HostTopology) -> list[tuple[Core, ...]]:
    """The cores behind each third-level cache; those behind none together."""
    of_cpu = {cpu: number for number, cache in enumerate(topology.caches) for cpu in cache}
    found: dict[int | None, list[Core]] = {}
    for core in cores:
        found.setdefault(of_cpu.get(core[0]), []).append(core)
    return [tuple(group) for group in found.values()]


def _caches(topology: HostTopology, pinned: set[int]) -> int:
    return sum(bool(pinned.intersection(cache)) for cache in topology.caches)


def _why(topology: HostTopology, pinned: set[int], left: Core) -> str:
    caches = _caches(topology, pinned)
    behind = f", behind {counted(caches, 'L3 cache')}" if caches else ""
    kept = f"CPUs {format_cpulist(left)} remain" if left else "no CPU is left"
    return f"a CPU for each vCPU: {format_cpulist(pinned)}{behind}; {kept} for the host"


def _notes(topology: HostTopology, pinned: set[int], left: Core) -> Iterable[str]:
    cores = sum(bool(set(left) & set(core)) for core in topology.cores)
    if cores < _HOST_CORES:
        yield (
            f"{counted(cores, 'core')} of the host remains for the host: pass fewer --vcpus for a "
            "smooth desktop"
        )
    caches = _caches(topology, pinned)
    largest = max(map(len, topology.caches), default=0)
    if caches > 1 and len(pinned) <= largest:
        yield (
            f"the vCPUs are behind {caches} L3 caches: none has {len(pinned)} CPUs besides the "
            "core of CPU 0"
        )
