"""A scheduler that only adds up counters, as Kubernetes' does, and hosts as it sees them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from msgspec.structs import replace

from tests.unit.node.made import unit
from vfiomgr.node.model import Inventory, NodeResource, NodeUnit
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Set as AbstractSet

    from vfiomgr.node.dra.model import DraDevice, Pool

NODE = "gpu-node-1"
Allocated = frozenset[tuple[str, str]]


def fits(pool: Pool, device: DraDevice, allocated: AbstractSet[tuple[str, str]]) -> bool:
    """Whether a device is free, and the counters suffice beside what published devices take.

    One counter that does not suffice excludes all devices with counters (checkAvailableCounters
    in k8s.io/dynamic-resource-allocation/structured).
    """
    if (pool.name, device.name) in allocated:
        return False
    taken: Counter[tuple[str, str]] = Counter()
    for each in pool.devices:
        if each is device or (pool.name, each.name) in allocated:
            for use in each.consumes:
                taken.update({(use.counter_set, name): n for name, n in use.counters.items()})
    if not _are_compatible(pool, device, allocated):
        return False
    known = {(s.name, name): n for s in pool.counter_sets for name, n in s.counters.items()}
    assert {*taken} <= {*known}
    return not device.consumes or all(taken[name] <= known[name] for name in known)


def _are_compatible(pool: Pool, device: DraDevice, allocated: AbstractSet[tuple[str, str]]) -> bool:
    """Whether all devices of a counter set share a compatibility group, or have none (KEP-5963)."""
    for use in device.consumes:
        others = (
            other.groups
            for each in pool.devices
            if (pool.name, each.name) in allocated
            for other in each.consumes
            if other.counter_set == use.counter_set
        )
        for groups in others:
            if (groups or use.groups) and not {*groups} & {*use.groups}:
                return False
    return True


def candidates(
    pools: Iterable[Pool], allocated: AbstractSet[tuple[str, str]]
) -> list[tuple[str, str]]:
    """The devices that the scheduler could allocate next."""
    return [(p.name, d.name) for p in pools for d in p.devices if fits(p, d, allocated)]


def filled(pools: Iterable[Pool], allocated: Allocated = frozenset()) -> Allocated:
    """What is allocated once the scheduler took each device that fits, from the first on."""
    taken = set(allocated)
    for pool in pools:
        for device in pool.devices:
            if fits(pool, device, taken):
                taken.add((pool.name, device.name))
    return frozenset(taken)


def names(pools: Iterable[Pool]) -> dict[str, list[str]]:
    """The devices of each pool."""
    return {pool.name: [device.name for device in pool.devices] for pool in pools}


def found(*units: NodeUnit) -> Inventory:
    """An inventory with these units."""
    return Inventory((NodeResource("vfiomgr.io/GPU", units),))


def mdev(uuid: str, parent: str = "0000:01:00.0") -> NodeUnit:
    """A mediated device of a GPU as a unit."""
    return replace(unit(uuid), kind="mdev", parent=PciAddress.parse(parent))
