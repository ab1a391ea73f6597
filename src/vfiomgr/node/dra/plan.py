"""The pools of a node: its devices, and the vGPUs that can be created.

Devices are named by their addresses and UUIDs. The vGPUs of a GPU have a pool of their own, with
counters: a change of one GPU does not publish the devices of the others again.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.node.dra.attributes import (
    type_memory,
    unit_attributes,
    unit_memory,
    vgpu_attributes,
)
from vfiomgr.node.dra.counters import gpu_label, offers_by_sums, share
from vfiomgr.node.dra.instances import offers_in_instances
from vfiomgr.node.dra.model import (
    DRIVER,
    MOST_TAINTS,
    Consumption,
    CounterSet,
    DraDevice,
    Pool,
    Taint,
    Target,
)
from vfiomgr.pci.model import is_address
from vfiomgr.value import Value
from vfiomgr.vgpu.capacity import gpus, in_order

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from collections.abc import Set as AbstractSet

    from vfiomgr.node.dra.counters import Offer, Offers
    from vfiomgr.node.model import Inventory, NodeUnit
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.capacity import Gpu

Allocated = tuple[str, str]
"""A pool and a device that a claim has."""

COUNTER_SET = "gpu"
"""The counter set of a pool of vGPUs."""
HELD = "held"
"""The taint of devices that a pod has from the device plugin."""
_NONE: Mapping[str, Allocated] = MappingProxyType({})


class _Claims(Value):
    """What claims have."""

    node: str
    allocated: frozenset[Allocated]
    created: Mapping[str, Allocated]


def pools(  # noqa: PLR0913 - each is a fact of its own, with a default
    host: HostSnapshot,
    found: Inventory,
    node: str,
    *,
    allocated: frozenset[Allocated] = frozenset(),
    created: Mapping[str, Allocated] = _NONE,
    creatable: AbstractSet[str] | None = None,
) -> tuple[Pool, ...]:
    """The pools of a node, by name; a pool without devices is left out.

    `allocated` are the devices that claims are known to have. `created` are the vGPUs that were
    created for claims, by UUID or address, each with its device: they are not published again, and
    need no further capacity. `creatable` are the GPUs on which vGPUs may be created, None for all.
    """
    claims = _Claims(node, allocated, created)
    shared = {gpu.name: gpu for gpu in gpus(host) if gpu.family != "sriov-vf"}
    carriers = {parent.name: gpu.name for gpu in shared.values() for parent in gpu.parents}
    carriers |= {name: name for name in shared}
    plain: list[NodeUnit] = []
    of_gpu: dict[str, list[NodeUnit]] = {name: [] for name in shared}
    for unit in _ordered(found.units):
        if unit.id not in created:
            of_gpu.get(_gpu_of(host, unit, carriers), plain).append(unit)
    made = [Pool(node, tuple(_unit_device(host, unit) for unit in plain))]
    for name, units in of_gpu.items():
        can_create = creatable is None or name in creatable
        made.append(_gpu_pool(host, shared[name], units, claims, can_create=can_create))
    return tuple(sorted((pool for pool in made if pool.devices), key=lambda pool: pool.name))


def unit_name(unit: NodeUnit) -> str:
    """The name of a unit as a device: `pci-0000-41-00-0`, `vgpu-UUID`."""
    return _function_name(unit.id) if is_address(unit.id) else f"vgpu-{unit.id.lower()}"


def _function_name(address: str) -> str:
    return "pci-" + address.replace(":", "-").replace(".", "-")


def _gpu_of(host: HostSnapshot, unit: NodeUnit, carriers: Mapping[str, str]) -> str:
    """The GPU of a vGPU, or the GPU that is passed through; empty for other units."""
    vgpu = host.vgpus.named(unit.id)
    names = [str(unit.parent), *map(str, unit.addresses), *([vgpu.parent] if vgpu else [])]
    return next((carriers[name] for name in names if name in carriers), "")


def _ordered(units: Iterable[NodeUnit]) -> list[NodeUnit]:
    """Units by address, then by UUID."""
    return sorted(units, key=lambda unit: in_order(unit.id))


def _unit_device(host: HostSnapshot, unit: NodeUnit) -> DraDevice:
    return DraDevice(
        unit_name(unit),
        Target(unit=unit.id),
        unit_attributes(host, unit),
        unit_memory(host, unit),
        taints=_taints(unit),
    )


def _taints(unit: NodeUnit) -> tuple[Taint, ...]:
    """Why a unit is not for new claims: it is unhealthy, or a pod has it from the device plugin.

    Never NoExecute: it would end pods whose guests may still work.
    """
    names = [reason.rule for reason in unit.reasons]
    if unit.pod:
        names.append(HELD)
    keys = dict.fromkeys(f"{DRIVER}/{name}" for name in names)
    return tuple(Taint(key, "", "NoSchedule") for key in [*keys][:MOST_TAINTS])


def _gpu_pool(
    host: HostSnapshot, gpu: Gpu, units: Sequence[NodeUnit], claims: _Claims, *, can_create: bool
) -> Pool:
    """The existing vGPUs of a GPU, those that can be created, and the GPU for passthrough.

    Passthrough takes all counters. It is not offered beside active vGPUs, and no vGPU is offered
    while a claim has the GPU itself, in this pool or from the time before it had vGPUs.
    """
    pool = f"{claims.node}/{gpu_label(gpu.name)}"
    offers = _offers(gpu, pool, claims)
    here = {device for name, device in claims.allocated if name == pool}
    entire = {_function_name(gpu.name), *(unit_name(u) for u in units if _is_entire(gpu, u))}
    is_taken = any(
        (name, each) in claims.allocated for name in (claims.node, pool) for each in entire
    )
    devices = []
    for unit in units:
        device = _unit_device(host, unit)
        is_vgpu = device.name not in entire
        if device.name in here or not (is_taken or (gpu.instances and not is_vgpu)):
            counters = {} if is_vgpu else offers.counters
            devices.append(replace(device, consumes=_consumption(counters)))
    devices += [
        _offered_device(host, gpu, offer)
        for offer in offers.offers
        if offer.name in here or (can_create and not is_taken)
    ]
    is_counted = any(device.consumes for device in devices)
    return Pool(
        pool,
        tuple(devices),
        (CounterSet(COUNTER_SET, offers.counters),) if is_counted else (),
    )


def _is_entire(gpu: Gpu, unit: NodeUnit) -> bool:
    """Whether a unit is the GPU itself, with the other functions of its group."""
    return unit.kind != "mdev" and gpu.name in map(str, unit.addresses)


def _offers(gpu: Gpu, pool: str, claims: _Claims) -> Offers:
    here = frozenset(device for name, device in claims.allocated if name == pool)
    own = {vgpu: device for vgpu, (name, device) in claims.created.items() if name == pool}
    shared = share(gpu, here, own)
    if gpu.partition is None:
        return offers_by_sums(shared)
    return offers_in_instances(shared, gpu.partition)


def _offered_device(host: HostSnapshot, gpu: Gpu, offer: Offer) -> DraDevice:
    return DraDevice(
        offer.name,
        Target(parent=gpu.name, type=offer.type.id),
        vgpu_attributes(host, gpu, offer.type),
        type_memory(offer.type),
        _consumption(offer.counters),
    )


def _consumption(counters: dict[str, int]) -> tuple[Consumption, ...]:
    return (Consumption(COUNTER_SET, counters),) if counters else ()
