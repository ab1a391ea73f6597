"""The pools of a node: its devices, and the vGPUs that can be created.

Devices are named by their addresses and UUIDs. The vGPUs of a GPU have a pool of their own, with
counters: a change of one GPU does not publish the devices of the others again.

Claims select devices by attributes; names without a domain belong to the driver. Values that change
often have no place there: each change is a write to the API server. The link is known while the
device is awake.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.node.dra.counters import MEMORY, Offer, gpu_label, offers_by_sums, share
from vfiomgr.node.dra.instances import offers_in_instances
from vfiomgr.node.dra.model import (
    DRIVER,
    LONGEST_TEXT,
    MOST_TAINTS,
    STANDARD,
    AttributeValue,
    Consumption,
    CounterSet,
    DraDevice,
    Pool,
    Taint,
    Target,
)
from vfiomgr.node.health import STUCK
from vfiomgr.pci.model import PciDevice, is_address
from vfiomgr.snapshot.hardware import memory_of
from vfiomgr.units import MIB
from vfiomgr.value import Value
from vfiomgr.vgpu.capacity import Gpu, gpus, in_order
from vfiomgr.vgpu.model import VgpuType, describe_type

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

    from vfiomgr.node.model import Inventory, NodeUnit
    from vfiomgr.snapshot.model import HostSnapshot

BUS_ID = f"{STANDARD}/pciBusID"
ROOT = f"{STANDARD}/pcieRoot"
NUMA_NODE = f"{STANDARD}/numaNode"
MDEV_UUID = "mdevUUID"
"""The name that KubeVirt reads (pkg/dra/utils.go)."""
FUNCTION = "function"
"""The family of devices that are not vGPUs."""

_Known = dict[str, "AttributeValue | None"]


def unit_attributes(host: HostSnapshot, unit: NodeUnit) -> dict[str, AttributeValue]:
    """The attributes of a unit of the inventory; unknown ones are left out."""
    found: _Known = {
        ROOT: unit.pcie_path[0] if unit.pcie_path else None,
        NUMA_NODE: unit.numa_nodes[0] if len(unit.numa_nodes) == 1 else None,
        "driver": unit.driver,
        "iommuGroup": unit.group,
        "viable": None if unit.group is None else _is_viable(host, unit),
    }
    vgpu = host.vgpus.named(unit.id)
    family = _FAMILIES.get(unit.kind, FUNCTION) if vgpu is None else vgpu.family
    device = host.device_named(str(unit.addresses[0])) if unit.addresses else None
    if unit.kind == "mdev":
        found |= {MDEV_UUID: unit.id}
    else:
        vendor, _, model = unit.pci_ids[0].partition(":") if unit.pci_ids else ("", "", "")
        bus_id = str(unit.addresses[0]) if unit.addresses else None
        found |= {BUS_ID: bus_id, "vendor": vendor, "device": model}
        found |= {"resetMethods": " ".join(device.reset_method) if device else None}
    if unit.kind == "function":
        found |= {"bound": unit.on_demand is None}
    if unit.kind != "function":
        found |= {"gpu": str(unit.parent or (vgpu.parent if vgpu else ""))}
        found |= {"vgpuType": _short(describe_type(unit.type, unit.type or None))}
    physical = host.device_named(str(unit.parent)) or device
    return _known({**_of_gpu(host, physical), **found, "family": family})


def _is_viable(host: HostSnapshot, unit: NodeUnit) -> bool:
    """Whether a guest can open its group, as soon as a claim has bound the device."""
    return unit.on_demand is not None or host.is_viable(unit.group or 0)


def vgpu_attributes(host: HostSnapshot, gpu: Gpu, kind: VgpuType) -> dict[str, AttributeValue]:
    """The attributes of a vGPU that can be created."""
    found: _Known = {
        NUMA_NODE: gpu.numa_node,
        "driver": gpu.parents[0].driver,
        "family": gpu.family,
        "gpu": gpu.name,
        "vgpuType": _short(kind),
    }
    if gpu.device is not None:
        found[ROOT] = gpu.device.bridges[0]
    return _known({**_of_gpu(host, gpu.device), **found})


def unit_memory(host: HostSnapshot, unit: NodeUnit) -> dict[str, int]:
    """The memory of a unit as a capacity, if it is known."""
    device = host.device_named(unit.id)
    if unit.kind == "quota":
        quotas = None if device is None else host.function_quotas(device)
        size = None if quotas is None else quotas.memory
    elif unit.kind == "function":
        known = None if device is None else memory_of(host, device)
        size = known.mib * MIB if known is not None and known.is_certain else None
    else:
        vgpu = host.vgpus.named(unit.id)
        kinds = host.vgpus.types_of(str(unit.parent or (vgpu.parent if vgpu else "")))
        wanted = vgpu.type if vgpu else ""
        kind = next((k for k in kinds if k.id == wanted), describe_type(wanted, unit.type or None))
        size = None if kind.framebuffer is None else kind.framebuffer * MIB
    return {MEMORY: size} if size else {}


def type_memory(kind: VgpuType) -> dict[str, int]:
    """The memory of a vGPU that can be created."""
    return {MEMORY: kind.framebuffer * MIB} if kind.framebuffer else {}


_FAMILIES = {"mdev": "mdev", "vendor": "vendor-vfio", "quota": "sriov-vf"}
"""The family of vGPUs that are not active any more, by the kind of their units."""


def _short(kind: VgpuType) -> str | None:
    """`A40-4Q`; the ID of a type without a name."""
    return kind.short_name or kind.id or None


def _of_gpu(host: HostSnapshot, device: PciDevice | None) -> _Known:
    """What a vGPU has in common with its GPU."""
    if device is None:
        return {}
    return {
        "vendor": device.vendor_id,
        "device": device.device_id,
        "model": device.short_name,
        "link": _link(host, device),
    }


def _link(host: HostSnapshot, device: PciDevice) -> str | None:
    """`16 GT/s x16`: the highest speed, since GPUs lower their speed when they are idle."""
    found = host.link_of(device.address)
    if found is None or found.max_speed is None or found.width is None:
        return None
    return f"{found.max_speed:g} GT/s x{found.width}"


def _known(found: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    """The values that are known; texts are cut to the limit, which counts bytes."""
    return {
        name: value.encode()[:LONGEST_TEXT].decode(errors="ignore")
        if isinstance(value, str)
        else value
        for name, value in found.items()
        if value is not None and value != ""
    }


Allocated = tuple[str, str]
"""A pool and a device that a claim has."""

COUNTER_SET = "gpu"
"""The counter set of a pool of vGPUs."""
ENTIRE = "passthrough"
"""The compatibility group of an entire GPU; devices without a group are compatible."""
HELD = "held"
"""The taint of devices that a pod has from the device plugin."""
_NONE: Mapping[str, Allocated] = MappingProxyType({})


class _Claims(Value):
    node: str
    allocated: frozenset[Allocated]
    created: Mapping[str, Allocated]
    has_groups: bool


def pools(  # noqa: PLR0913 - each is a fact of its own, with a default
    host: HostSnapshot,
    found: Inventory,
    node: str,
    *,
    allocated: frozenset[Allocated] = frozenset(),
    created: Mapping[str, Allocated] = _NONE,
    creatable: AbstractSet[str] | None = None,
    has_groups: bool = False,
) -> tuple[Pool, ...]:
    """The pools of a node, by name; a pool without devices is left out.

    `allocated` are the devices that claims are known to have. `created` are the vGPUs that were
    created for claims, by UUID or address, each with its device: they are not published again, and
    need no further capacity. `creatable` are the GPUs on which vGPUs may be created, None for all;
    none is created on a GPU that claims bind. `has_groups`: the API server knows compatibility
    groups.
    """
    claims = _Claims(node, allocated, created, has_groups)
    shared = {gpu.name: gpu for gpu in gpus(host) if gpu.family != "sriov-vf"}
    carriers = {parent.name: gpu.name for gpu in shared.values() for parent in gpu.parents}
    carriers |= {name: name for name in shared}
    plain: list[NodeUnit] = []
    of_gpu: dict[str, list[NodeUnit]] = {name: [] for name in shared}
    for unit in sorted(found.units, key=lambda unit: in_order(unit.id)):
        if unit.id not in created:
            named = "" if unit.on_demand else _gpu_of(host, unit, carriers)
            of_gpu.get(named, plain).append(unit)
    bound = {str(address) for unit in found.on_demand for address in unit.addresses}
    made = [Pool(node, tuple(unit_device(host, unit) for unit in plain))]
    for name, units in of_gpu.items():
        can_create = (creatable is None or name in creatable) and name not in bound
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


def unit_device(host: HostSnapshot, unit: NodeUnit) -> DraDevice:
    """A unit of the inventory as a device."""
    return DraDevice(
        unit_name(unit),
        Target(unit=unit.id, on_demand=unit.on_demand),
        unit_attributes(host, unit),
        unit_memory(host, unit),
        taints=_taints(unit),
    )


def _taints(unit: NodeUnit) -> tuple[Taint, ...]:
    """Why a unit is not for new claims: it is unhealthy, or a pod has it from the device plugin.

    NoExecute only if the kernel is stuck: a pod that waits for the device can never start. With
    other reasons, guests may still work. What is worse than it should be has no effect.
    """
    names = [reason.rule for reason in unit.reasons]
    if unit.pod:
        names.append(HELD)
    found = [*dict.fromkeys(names)][:MOST_TAINTS]
    taints = [
        Taint(f"{DRIVER}/{name}", "", "NoExecute" if name == STUCK else "NoSchedule")
        for name in found
    ]
    taints += (Taint(f"{DRIVER}/{name}", "", "None") for name in unit.hints)
    return tuple(taints[:MOST_TAINTS])


def with_near_nodes(
    made: tuple[Pool, ...], near: Mapping[int, tuple[int, ...]]
) -> tuple[Pool, ...]:
    """The pools, where devices also have the nodes near their NUMA node, if there are some.

    The PCIe root stays one text: a function has one, and in constraints it counts as a list.
    """

    def replaced(device: DraDevice) -> DraDevice:
        number = device.attributes.get(NUMA_NODE)
        nodes = near.get(number, ()) if isinstance(number, int) else ()
        if nodes == (number,) or not nodes:
            return device
        return replace(device, attributes={**device.attributes, NUMA_NODE: nodes})

    return tuple(replace(pool, devices=tuple(map(replaced, pool.devices))) for pool in made)


def with_known_facts(made: tuple[Pool, ...], before: tuple[Pool, ...]) -> tuple[Pool, ...]:
    """The pools, where devices that claims bind keep what only their host drivers report.

    Memory, for example: without it each bind would write slices, and again each return.
    """
    known = {(pool.name, each.name): each for pool in before for each in pool.devices}
    return tuple(
        replace(pool, devices=tuple(_with_known(known, pool, d) for d in pool.devices))
        for pool in made
    )


def _with_known(known: Mapping[Allocated, DraDevice], pool: Pool, device: DraDevice) -> DraDevice:
    before = known.get((pool.name, device.name))
    if device.target.on_demand is None or before is None:
        return device
    if any(before.attributes.get(n) != device.attributes.get(n) for n in ("vendor", "device")):
        return device  # another device is at this address
    return replace(
        device,
        attributes={**before.attributes, **device.attributes},
        capacity={**before.capacity, **device.capacity},
    )


def _gpu_pool(
    host: HostSnapshot, gpu: Gpu, units: Sequence[NodeUnit], claims: _Claims, *, can_create: bool
) -> Pool:
    """The existing vGPUs of a GPU, those that can be created, and the GPU for passthrough.

    Passthrough takes all counters. It is not offered beside active vGPUs, and no vGPU is offered
    while a claim has the GPU itself, in this pool or from the time before it had vGPUs.
    """
    pool = f"{claims.node}/{gpu_label(gpu.name)}"
    here = frozenset(device for name, device in claims.allocated if name == pool)
    own = {vgpu: device for vgpu, (name, device) in claims.created.items() if name == pool}
    shared = share(gpu, here, own)
    if gpu.partition is None:
        offers = offers_by_sums(shared, has_groups=claims.has_groups)
    else:
        offers = offers_in_instances(shared, gpu.partition)
    passed_through = (u for u in units if u.kind != "mdev" and gpu.name in map(str, u.addresses))
    entire = {_function_name(gpu.name), *map(unit_name, passed_through)}
    is_taken = any(
        (name, each) in claims.allocated for name in (claims.node, pool) for each in entire
    )
    whole = (ENTIRE,) if any(offer.groups for offer in offers.offers) else ()
    devices = []
    for unit in units:
        device = unit_device(host, unit)
        is_vgpu = device.name not in entire
        if device.name in here or not (is_taken or (gpu.instances and not is_vgpu)):
            counters = {} if is_vgpu else offers.counters
            devices.append(replace(device, consumes=_consumption(counters, whole)))
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


def _offered_device(host: HostSnapshot, gpu: Gpu, offer: Offer) -> DraDevice:
    return DraDevice(
        offer.name,
        Target(parent=gpu.name, type=offer.type.id),
        vgpu_attributes(host, gpu, offer.type),
        type_memory(offer.type),
        _consumption(offer.counters, offer.groups),
    )


def _consumption(counters: dict[str, int], groups: tuple[str, ...]) -> tuple[Consumption, ...]:
    return (Consumption(COUNTER_SET, counters, groups),) if counters else ()
