"""Devices on host drivers that ResourceClaims bind, and return: a layout marks them as on-demand.

The published attributes of such a device are the same before, during and after a claim, so that a
bind writes no slice. `driver` is therefore always the VFIO driver.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, Remedy, blocker, diagnostics_of
from vfiomgr.engine.registry import plan
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.expressions import expression
from vfiomgr.guests.nodes import AssignableGroup, default_form, node_access, node_paths
from vfiomgr.node.model import Inventory, NodeSettings, NodeUnit, OnDemand
from vfiomgr.passthrough import guards
from vfiomgr.passthrough.plan import drivers_for
from vfiomgr.passthrough.steps import Bind
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress, PciDevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from vfiomgr.host.tree import HostTree
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.users.model import Monitor

    Judge = Callable[[NodeUnit], NodeUnit]

_NODE = expression(r"/dev/(nvidia|dri/card)([0-9]+)")
_GPUS = HostPath("/proc/driver/nvidia/gpus")
_UUID = expression(r"(?m)^GPU UUID:\s+(GPU-[0-9a-f-]{36})\s*$")
_OF_BOUND = frozenset({"wrong-driver", "group-not-viable", "node-missing", "node-owner"})
"""Rules of bound devices, about what a bind changes."""


def on_demand_units(
    host: HostSnapshot, settings: NodeSettings, judge: Judge, previous: Inventory | None = None
) -> tuple[NodeUnit, ...]:
    """The devices that claims bind, by address; `judge` adds the claim, and reasons against it.

    A device that is gone stays, with the reason, while a claim has it.
    """
    found = {unit.id: unit for unit in _units(host, settings, judge)}
    for unit in () if previous is None else previous.on_demand:
        if unit.id not in found and (judged := judge(unit)).claim:
            own = {*unit.addresses}
            found = {name: each for name, each in found.items() if own.isdisjoint(each.addresses)}
            found[unit.id] = judged
    return tuple(found[name] for name in sorted(found))


def _units(host: HostSnapshot, settings: NodeSettings, judge: Judge) -> Iterator[NodeUnit]:
    taken: set[PciAddress] = set()
    for device in host.devices:
        how = settings.on_demand.get(str(device.address))
        if how is not None and device.address not in taken:
            unit = unit_of(host, device.address, how)
            if not taken.isdisjoint(unit.addresses):
                continue
            taken.update(unit.addresses)
            yield _judged(host, unit, judge(unit))


def unit_of(host: HostSnapshot, address: PciAddress, how: OnDemand) -> NodeUnit:
    """A device as a unit, on its host driver or bound; it has nodes while it is bound.

    Whatever function is named, the unit has the name of its GPU, or else of its first function.

    Raises:
        UsageError: the host does not have it.
    """
    drivers = drivers_for(host, Bind((address,), driver=how.driver))
    functions = tuple(map(host.device, sorted(drivers)))
    first = next((d for d in functions if d.is_graphics_or_accelerator), functions[0])
    functions = (first, *(each for each in functions if each is not first))
    offer = AssignableGroup(-1 if first.iommu_group is None else first.iommu_group, functions)
    is_bound = all(function.is_on_vfio for function in functions)
    return NodeUnit(
        id=str(first.address),
        kind="function",
        addresses=tuple(function.address for function in functions),
        group=first.iommu_group,
        nodes=node_paths(offer, default_form(host, offer)) if is_bound else (),
        numa_nodes=tuple(sorted({d.numa_node for d in functions if d.numa_node is not None})),
        pcie_path=first.bridges,
        pci_ids=tuple(f"{d.vendor_id}:{d.device_id}" for d in functions),
        driver=drivers[first.address].driver,
        access=node_access(host, offer),
        on_demand=how,
        aliases=() if is_bound else tuple(_aliases(first)),
    )


def _aliases(device: PciDevice) -> Iterator[str]:
    """What others call a GPU by its nodes.

    NVIDIA's DRA driver: `gpu-MINOR` (CanonicalName in cmd/gpu-kubelet-plugin/deviceinfo.go).
    Intel's device plugin: `cardN-SHARE` (cmd/gpu_plugin/gpu_plugin.go).
    """
    for node in device.nodes:
        if (found := _NODE.fullmatch(node)) is not None:
            kind, number = found.groups()
            yield f"gpu-{number}" if kind == "nvidia" else f"card{number}"


def with_uuids(tree: HostTree, units: tuple[NodeUnit, ...]) -> tuple[NodeUnit, ...]:
    """The units with the UUIDs of NVIDIA's GPUs, by which its device plugin calls them."""
    return tuple(
        replace(unit, aliases=(*unit.aliases, uuid)) if (uuid := _uuid(tree, unit)) else unit
        for unit in units
    )


def _uuid(tree: HostTree, unit: NodeUnit) -> str | None:
    text = "" if unit.nodes else tree.read_text(_GPUS / unit.id / "information") or ""
    found = _UUID.search(text)
    return None if found is None else found[1]


def _judged(host: HostSnapshot, unit: NodeUnit, judged: NodeUnit) -> NodeUnit:
    """The unit with the reasons why no claim can have it, or why the one that has it ends."""
    stuck = tuple(_stuck(host, unit))
    if unit.nodes:
        return replace(judged, reasons=(*judged.reasons, *stuck))
    of_device = [reason for reason in judged.reasons if reason.rule not in _OF_BOUND]
    against = stuck if judged.claim else tuple(_against(host, unit))
    return replace(judged, reasons=(*of_device, *against))


def _stuck(host: HostSnapshot, unit: NodeUnit) -> Iterator[Diagnostic]:
    """The functions that the kernel does not return from."""
    functions = (d for address in unit.addresses if (d := host.device_named(str(address))))
    for each in chain.from_iterable(guards.stuck(host, device) for device in functions):
        yield replace(each, subject=unit.id)


def _against(host: HostSnapshot, unit: NodeUnit) -> Iterator[Diagnostic]:
    """The reasons to refuse the bind."""
    how = unit.on_demand or OnDemand()
    seen = replace(host, users=host.users.without(how.stop))
    try:
        plan(seen, request_of(unit))
    except Refusal as refusal:
        for each in for_claims(diagnostics_of(refusal), monitors_of(seen, unit)):
            yield replace(each, subject=unit.id, override=None)
    except UsageError as error:
        yield blocker("not-ready", unit.id, error.message, "correct its rule in the layout")


def monitors_of(host: HostSnapshot, unit: NodeUnit) -> frozenset[Monitor | None]:
    """What has a device open, by kind; None for programs that do more than watch it."""
    functions = (d for address in unit.addresses if (d := host.device_named(str(address))))
    return frozenset(user.monitor for d in functions for user in host.holders(d))


def for_claims(
    found: Iterable[Diagnostic], monitors: AbstractSet[Monitor | None] = frozenset()
) -> Iterator[Diagnostic]:
    """Refusals in the words of a claim, which has no options, but a rule in the layout."""
    kinds = ", ".join(sorted(filter(None, monitors)))
    setting = Remedy(f"have claims stop them while they bind: stop: [{kinds}] in the layout's rule")
    for each in found:
        plain = each.without("allow", "at-boot", "only")
        is_theirs = bool(kinds) and each.rule == "in-use"
        yield replace(plain, remedies=(*plain.remedies, setting)) if is_theirs else plain


def request_of(unit: NodeUnit) -> Bind:
    """The request by which a claim binds a device."""
    how = unit.on_demand or OnDemand()
    return Bind((PciAddress.parse(unit.id),), driver=how.driver, allow=frozenset(how.allow))
