"""The resources of a node: what is ready for guests, by model and type, and what is not offered."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.containers.cdi.devices import why_not_ready
from vfiomgr.containers.cdi.document import read_file
from vfiomgr.containers.cdi.model import CLAIM_KIND, DEFAULT_KIND
from vfiomgr.containers.resource_names import (
    DeviceKind,
    is_fit,
    is_without_memory,
    kind_of_function,
    kind_of_vgpu,
    name_resources,
    qualified,
)
from vfiomgr.diagnostic import Diagnostic, blocker, info
from vfiomgr.guests.nodes import AssignableGroup, default_form, node_access, node_paths, offers
from vfiomgr.node.health import (
    HealthContext,
    hints,
    is_unusable,
    published_in,
    reasons,
    users_of,
    worse_links,
)
from vfiomgr.node.model import (
    Inventory,
    NodeResource,
    NodeSettings,
    NodeUnit,
    ResourceRule,
    UnitKind,
)
from vfiomgr.node.on_demand import on_demand_units
from vfiomgr.passthrough import guards
from vfiomgr.pci.model import PciAddress, PciDevice, is_address
from vfiomgr.value import Value
from vfiomgr.vgpu.quota.capacity import function_vgpus

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu

_NOTHING = HealthContext()


class _Found(Value):
    """A unit, and what its resource is named after."""

    unit: NodeUnit
    kind: DeviceKind


def inventory(
    host: HostSnapshot,
    settings: NodeSettings,
    known: HealthContext = _NOTHING,
    *,
    previous: Inventory | None = None,
    written: Iterable[str] = (),
) -> Inventory:
    """The resources of a host, by name, their units by ID, and why other devices are not offered.

    Until the pod that holds a unit ends, the unit stays in its resource of `previous`. Units of
    `previous` that are not ready any more stay, with the reason. `written` are the kinds of the
    agent's CDI specifications; other files are another program's.

    Raises:
        UsageError: the prefix or an alias of the settings is invalid.
    """
    known = replace(
        known,
        hints={} if previous is None else {unit.id: unit.hints for unit in previous.units},
        links=worse_links(host),
    )
    context = replace(known, elsewhere=_elsewhere(host, frozenset((*written, CLAIM_KIND))))
    bound = on_demand_units(host, settings, lambda u: _judged(host, u, context), previous)
    found = list(_units(host, _functions_of(bound)))
    lost = _lost(previous, found)
    taken = _functions_of(unit for _, unit in lost)
    kept = _held_names(previous, known.held)
    chosen = [
        each
        for each in found
        if (_is_chosen(settings, each.unit) or each.unit.id in kept)
        and not _is_part(each.unit, taken)
    ]
    names = name_resources((each.kind for each in chosen), settings)
    named = []
    for each in chosen:
        rule = _rule_of(settings, each.unit)
        name = qualified(rule.name, settings) if rule and rule.name else names[each.kind.key]
        named.append((kept.get(each.unit.id, name), each.unit))
    own = frozenset((*written, CLAIM_KIND, *(name for name, _ in (*named, *lost))))
    context = replace(known, elsewhere=_elsewhere(host, own | {DEFAULT_KIND}))
    by_name: dict[str, list[NodeUnit]] = defaultdict(list)
    for name, unit in named:
        by_name[name].append(_judged(host, unit, context))
    for name, unit in lost:
        by_name[name].append(_withdrawn(_judged(host, unit, context)))
    resources = tuple(_resource(name, by_name[name], settings) for name in sorted(by_name))
    left_out = [e for e in found if e.unit.id not in kept and not _is_chosen(settings, e.unit)]
    notes = (
        *_notes(host, [*(each.unit for each in found), *bound], left_out, resources),
        *_also_published(host, resources, _elsewhere(host, own)),
    )
    return Inventory(resources, notes, bound)


def _units(host: HostSnapshot, others: AbstractSet[PciAddress]) -> Iterator[_Found]:
    """All units that are ready, by address; mediated devices last. `others` are on demand."""
    quotas = {vgpu.parent: vgpu for vgpu in function_vgpus(host)}
    for offer in offers(host, with_mediated=True):
        if any(function.address in others for function in offer.functions):
            continue
        if offer.vgpu is not None:
            yield _mediated(host, offer, offer.vgpu)
        elif is_fit(host, offer):
            yield _group(host, offer, quotas)


def _group(host: HostSnapshot, offer: AssignableGroup, quotas: Mapping[str, Vgpu]) -> _Found:
    functions = sorted(offer.functions, key=lambda device: str(device.address) != offer.name)
    first = functions[0]
    vgpu = (
        host.vgpus.named(offer.name)
        if host.vgpus.is_vendor_function(first)
        else quotas.get(offer.name)
    )
    kind: UnitKind = "function"
    if vgpu is not None:
        kind = "vendor" if vgpu.family == "vendor-vfio" else "quota"
    unit = NodeUnit(
        id=offer.name,
        kind=kind,
        addresses=tuple(device.address for device in functions),
        group=offer.group,
        nodes=node_paths(offer, default_form(host, offer)),
        numa_nodes=_numa_nodes(functions),
        pcie_path=first.bridges,
        parent=None if vgpu is None else first.physical_function,
        pci_ids=tuple(f"{device.vendor_id}:{device.device_id}" for device in functions),
        driver=first.driver or "",
        type=_type_name(vgpu),
        access=node_access(host, offer),
    )
    return _Found(unit, kind_of_function(host, first))


def _type_name(vgpu: Vgpu | None) -> str:
    if vgpu is None:
        return ""
    return vgpu.type_name or ("" if vgpu.family == "sriov-vf" else vgpu.type)


def _mediated(host: HostSnapshot, offer: AssignableGroup, vgpu: Vgpu) -> _Found:
    parent = host.device_named(vgpu.parent)
    physical = None
    if parent is not None:
        physical = parent.physical_function or parent.address
    elif is_address(vgpu.parent):
        physical = PciAddress.parse(vgpu.parent)
    unit = NodeUnit(
        id=vgpu.name,
        kind="mdev",
        addresses=(PciAddress.parse(vgpu.parent),) if is_address(vgpu.parent) else (),
        group=offer.group,
        nodes=node_paths(offer, default_form(host, offer)),
        numa_nodes=_numa_nodes([parent] if parent is not None else []),
        pcie_path=parent.bridges if parent is not None else (),
        parent=physical,
        driver=vgpu.driver or "",
        type=_type_name(vgpu),
    )
    return _Found(unit, kind_of_vgpu(host, vgpu))


def _numa_nodes(functions: Iterable[PciDevice]) -> tuple[int, ...]:
    return tuple(sorted({d.numa_node for d in functions if d.numa_node is not None}))


def _rule_of(settings: NodeSettings, unit: NodeUnit) -> ResourceRule | None:
    """The first rule of a layout that has a unit, by one of its functions or its parent."""
    names = {unit.id, *map(str, unit.addresses), str(unit.parent)}
    return next((r for r in settings.rules or () if not names.isdisjoint(r.devices)), None)


def _is_chosen(settings: NodeSettings, unit: NodeUnit) -> bool:
    return settings.rules is None or _rule_of(settings, unit) is not None


def _lost(previous: Inventory | None, found: Iterable[_Found]) -> list[tuple[str, NodeUnit]]:
    """The units that were offered before and are not ready in the same form now.

    A pod may still have one: a unit that has become a part of another takes that one with it.
    """
    now = {each.unit.id: each.unit for each in found}
    resources = previous.resources if previous is not None else ()
    kept = [(resource.name, unit) for resource in resources for unit in resource.units]
    lost = [(name, unit) for name, unit in kept if unit.id not in now]
    more = lost
    while more:
        gone = {unit.id for _, unit in lost}
        taken = _functions_of(unit for _, unit in lost)
        kept = [(name, unit) for name, unit in kept if unit.id not in gone]
        more = [(name, unit) for name, unit in kept if _is_part(now[unit.id], taken)]
        lost = [*lost, *more]
    return lost


def _held_names(previous: Inventory | None, held: Mapping[str, str]) -> dict[str, str]:
    """The resources of units that pods have; under another name they could be given again."""
    resources = previous.resources if previous is not None else ()
    return {unit.id: r.name for r in resources for unit in r.units if unit.id in held}


def _functions_of(units: Iterable[NodeUnit]) -> frozenset[PciAddress]:
    return frozenset(a for unit in units if unit.kind != "mdev" for a in unit.addresses)


def _is_part(unit: NodeUnit, taken: AbstractSet[PciAddress]) -> bool:
    """Whether it has a function of a unit that was lost, and that a pod may still have."""
    return unit.kind != "mdev" and not taken.isdisjoint(unit.addresses)


def _judged(host: HostSnapshot, unit: NodeUnit, context: HealthContext) -> NodeUnit:
    users = users_of(host, unit)
    pod, claim = context.held.get(unit.id, ""), context.claims.get(unit.id, "")
    given = pod or (f"claim {claim}" if claim else "")
    return replace(
        unit,
        reasons=reasons(host, unit, context),
        hints=hints(host, unit, context),
        used_by=given or next((user.pod or str(user) for user in users), ""),
        pod=pod,
        claim=claim,
        is_open=bool(users),
    )


def _withdrawn(unit: NodeUnit) -> NodeUnit:
    """A lost unit, with a reason that it cannot be opened: its nodes may be others' now."""
    if is_unusable(unit):
        return unit
    summary = f"{unit.id} cannot be assigned as before"
    against = blocker("not-ready", unit.id, summary, "restart the agent to forget it")
    return replace(unit, reasons=(*unit.reasons, against))


def _resource(name: str, units: list[NodeUnit], settings: NodeSettings) -> NodeResource:
    """A resource with the consumer and the reset of the first rule that has one of its units."""
    rules = [rule for unit in units if (rule := _rule_of(settings, unit)) is not None]
    consumers = (rule.consumer for rule in rules if rule.consumer is not None)
    resets = (rule.resets for rule in rules if rule.resets is not None)
    return NodeResource(
        name,
        tuple(sorted(units, key=lambda unit: unit.id)),
        next(consumers, settings.consumer),
        resets=next(resets, settings.resets),
    )


def _notes(
    host: HostSnapshot,
    found: Iterable[NodeUnit],
    left_out: Iterable[_Found],
    resources: Sequence[NodeResource],
) -> Iterator[Diagnostic]:
    """Why devices are not offered, by address, and what is special about offered ones."""
    given = _functions_of(found)
    for device in host.devices:
        if device.address not in given:
            yield from _why_not(host, device)
    for each in left_out:
        summary = f"no rule of the layout has a resource for {each.unit.id}"
        yield _note("not-in-layout", each.unit.id, summary, "add resource: {} to its rule")
    for resource in resources:
        yield from _about(host, resource)


def _elsewhere(host: HostSnapshot, own: AbstractSet[str]) -> dict[str, str]:
    """The CDI files that other programs may offer devices from, by the paths of their nodes.

    vfiomgr also writes files for other device plugins; its default kind is for no plugin.
    """
    found = ((file, read_file(file)) for file in host.cdi_files)
    return {
        node.on_host: file.path
        for file, specification in found
        if not (file.is_own and specification.kind in own)
        for device in specification.devices
        for node in device.edits.device_nodes
    }


def _also_published(
    host: HostSnapshot, resources: Iterable[NodeResource], elsewhere: Mapping[str, str]
) -> Iterator[Diagnostic]:
    """Devices of other CDI files that are offered all the same."""
    for unit in (unit for resource in resources for unit in resource.units):
        if all(reason.rule != "twice-published" for reason in unit.reasons):
            for reason in published_in(host, unit, elsewhere):
                yield replace(reason, severity="warning")


def _why_not(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Why a device is not offered: GPUs and accelerators, and all functions on VFIO drivers."""
    if device.is_bridge or not (device.is_graphics_or_accelerator or device.is_on_vfio):
        return
    against = next(guards.active_virtual_functions(host, device), None)
    against = against or next(guards.vgpu_parent(host, device), None)
    if against is None and not device.is_on_vfio and not host.vgpus.is_vendor_function(device):
        summary = f"{device} is on {device.driver or 'no driver'}"
        on_host_driver = _note("on-host-driver", device, summary, f"vfiomgr bind {device.address}")
        against = next(guards.boot_display(host, device), None) or on_host_driver
    if against is None and is_without_memory(host, device):
        against = _note(
            "vgpu-function",
            device,
            f"{device} is a virtual function of an NVIDIA GPU, which has no memory on "
            f"{device.driver}",
            f"vfiomgr unbind {device.address}, then: vfiomgr vgpu create --parent "
            f"{device.address} --type TYPE",
        )
    against = against or why_not_ready(host, device)
    yield replace(against, severity="info", override=None)


def _about(host: HostSnapshot, resource: NodeResource) -> Iterator[Diagnostic]:
    if resource.consumer == "kata" and any(unit.kind == "mdev" for unit in resource.units):
        yield _note(
            "mediated",
            resource.name,
            f"Kata attaches no mediated devices, and {resource.name} has some",
            "use virtual functions, or another consumer",
        )
    for unit in resource.units:
        devices = [host.device_named(str(address)) for address in unit.addresses]
        gpus = [d for d in devices if d is not None and d.is_graphics_or_accelerator]
        if len(gpus) > 1:
            yield _note(
                "several-gpus",
                unit.id,
                f"IOMMU group {unit.group} has {len(gpus)} GPUs, which are offered as one device",
                "to offer them separately, move one to a slot with its own group",
            )


def _note(rule: str, subject: object, summary: str, remedy: str = "") -> Diagnostic:
    return info(rule, summary, (), "", remedy, subject=subject)
