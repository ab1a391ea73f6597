"""Assigns devices to the rules of a layout, and splits it into parts that change separately."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, Override, blocker, diagnostics_of
from vfiomgr.engine.plan import Plan
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.gpu.plan import vgpus_on
from vfiomgr.gpu.requests import SwitchCheckpoint
from vfiomgr.layout.model import HostRule, OnDemandRule, Rule, SriovRule, VgpuRule, WholeRule
from vfiomgr.layout.requests import ApplyLayout, FunctionBefore, LayoutCheckpoint
from vfiomgr.passthrough.steps import DropOriginalState, SaveOriginalState
from vfiomgr.pci.model import PciAddress, PciDevice
from vfiomgr.snapshot.model import HostSnapshot
from vfiomgr.units import counted
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.owners import NodeOwner
    from vfiomgr.layout.model import Layout, Selector
    from vfiomgr.vgpu.instance_model import InstancePlace

_Thing = TypeVar("_Thing")


class RuleMatch(Value):
    """A rule and its devices."""

    number: int
    """Its position in the layout, from 1."""
    rule: Rule
    devices: tuple[PciDevice, ...]
    parents: tuple[str, ...] = ()
    """Parents of vGPUs that are not PCI functions."""
    rest: tuple[PciDevice, ...] = ()
    """Other functions of the slots, which return to the host with them."""

    @property
    def label(self) -> str:
        """`rule 2 (class 0302)`."""
        return f"rule {self.number} ({self.rule.select})"


class Selection(Value):
    """The devices of all rules, and reasons against the entire layout."""

    claims: tuple[RuleMatch, ...]
    diagnostics: tuple[tuple[RuleMatch, Diagnostic], ...]
    shortages: tuple[tuple[RuleMatch, Diagnostic], ...]
    """Rules with fewer devices than required, of those present now."""


def select(host: HostSnapshot, layout: Layout) -> Selection:
    """Assign each device to the first rule that selects it, with the rest of its slot."""
    taken: dict[PciAddress, RuleMatch] = {}
    taken_parents: set[str] = set()
    claims: list[RuleMatch] = []
    diagnostics: list[tuple[RuleMatch, Diagnostic]] = []
    shortages: list[tuple[RuleMatch, Diagnostic]] = []
    for number, rule in enumerate(layout.devices, start=1):
        chosen = tuple(d for d in matching(host, rule.select) if d.address not in taken)
        parents = tuple(p for p in _parents(host, rule.select) if p not in taken_parents)
        taken_parents.update(parents)
        claim = RuleMatch(number, rule, chosen, parents)
        companions = []
        if isinstance(rule, WholeRule) and (isinstance(rule, OnDemandRule) or not rule.only):
            companions = [other for other in _slots(host, claim) if other not in chosen]
        against = (*_unfit(claim), *_conflicts(claim, companions, taken))
        diagnostics += [(claim, diagnostic) for diagnostic in against]
        shortages += [(claim, diagnostic) for diagnostic in _too_few(host, claim, taken)]
        taken |= dict.fromkeys((d.address for d in (*chosen, *companions)), claim)
        if isinstance(rule, SriovRule) and rule.functions != "any":  # it says who has them
            taken |= dict.fromkeys((a for d in chosen for a in d.virtual_functions), claim)
        claims.append(claim)
    # The host gets the rest of its slots, unless other rules select them.
    for at, claim in enumerate(claims):
        if isinstance(claim.rule, HostRule):
            others = (d for d in _slots(host, claim) if d not in claim.devices)
            rest = tuple(d for d in others if d.address not in taken)
            claims[at] = replace(claim, rest=rest)
    return Selection(tuple(claims), tuple(diagnostics), tuple(shortages))


def _slots(host: HostSnapshot, claim: RuleMatch) -> list[PciDevice]:
    """All functions in the slots of a claim's devices."""
    found = {other.address: other for device in claim.devices for other in host.slot(device)}
    return list(found.values())


def matching(host: HostSnapshot, selector: Selector) -> Iterator[PciDevice]:
    """The devices of a host that meet all criteria."""
    return (device for device in host.devices if _is_selected(device, selector))


def _is_selected(device: PciDevice, selector: Selector) -> bool:
    """Whether all criteria match; bridges, displays and virtual functions require an address."""
    if selector.parent:
        return False
    if not selector.address:
        if device.is_bridge or device.is_boot_display:
            return False
        if device.physical_function is not None and not selector.physical_function:
            return False
    identifiers = (f"{device.vendor_id}:{device.device_id}", f"{device.vendor_id}:*")
    return (
        (not selector.address or device.address in selector.address)
        and (not selector.id or any(one in selector.id for one in identifiers))
        and (not selector.classes or device.class_code.startswith(selector.class_prefixes))
        and (not selector.name or selector.fits_name(device.name))
        and (not selector.numa_node or device.numa_node in selector.numa_node)
        and (not selector.serial or device.serial in selector.serial)
        and (
            not selector.physical_function or device.physical_function in selector.physical_function
        )
        and (not selector.all or device.is_graphics_or_accelerator)
    )


def _parents(host: HostSnapshot, selector: Selector) -> Iterator[str]:
    """Parents of vGPUs by name, including the kernel's sample devices."""
    names = (parent.name for parent in host.vgpus.parents if host.device_named(parent.name) is None)
    return (name for name in dict.fromkeys(names) if name in selector.parent)


def _conflicts(
    claim: RuleMatch, companions: Iterable[PciDevice], taken: dict[PciAddress, RuleMatch]
) -> Iterator[Diagnostic]:
    """Functions of one slot in two rules with different states."""
    for device in companions:
        other = taken.get(device.address)
        if other is not None and other.rule.state != claim.rule.state:
            yield blocker(
                "layout-slot-split",
                device,
                f"{device} is {other.rule.state} in {other.label}, but "
                f"{claim.label} includes it as {claim.rule.state} with its slot",
                "give the functions of one slot one state, or set only: true",
            )


def _too_few(
    host: HostSnapshot, claim: RuleMatch, taken: dict[PciAddress, RuleMatch]
) -> Iterator[Diagnostic]:
    found = len(claim.devices) + len(claim.parents)
    wanted = claim.rule.at_least
    if found >= wanted:
        return
    names = [*map(str, claim.devices), *claim.parents]
    there = f": {', '.join(names)}" if names else ""
    yield blocker(
        "layout-too-few",
        claim.label,
        f"{claim.label} requires at least {counted(wanted, 'device')}, but "
        f"this host has {found or 'none'}{there}",
        _remedy_for_few(host, claim.rule.select, taken),
    )


def _remedy_for_few(
    host: HostSnapshot, selector: Selector, taken: dict[PciAddress, RuleMatch]
) -> str:
    lost = [
        f"{d.address} belongs to {taken[d.address].label}"
        for d in matching(host, selector)
        if d.address in taken
    ]
    if lost:
        return (
            f"{'; '.join(lost)}: a device belongs to the first rule that selects it, with its slot"
        )
    hidden: list[str] = []
    for device in host.devices if not selector.address else ():
        named = selector.model_copy(update={"address": (device.address,)})
        if device.is_boot_display and _is_selected(device, named):
            hidden.append(str(device))
    if hidden:
        return f"{', '.join(hidden)} is the console's display: only address selects it"
    return (
        "look for the missing device with vfiomgr list --all, or set at_least: 0 if it is optional"
    )


def _unfit(claim: RuleMatch) -> Iterator[Diagnostic]:
    """Rules with parents that are not PCI functions, in another state than vgpu."""
    if claim.rule.select.parent and not isinstance(claim.rule, VgpuRule):
        yield blocker(
            "layout-not-pci",
            claim.label,
            f"{claim.label} selects {' and '.join(claim.rule.select.parent)} by parent, which "
            f"are not PCI functions and cannot be {claim.rule.state}",
            "select PCI functions by address, id or class; parent requires state: vgpu",
        )


def components(
    things: Iterable[_Thing], keys_of: Callable[[_Thing], Iterable[Hashable]]
) -> list[list[_Thing]]:
    """Group things that share a key, directly or through other things, in their original order."""
    leader: dict[Hashable, Hashable] = {}

    def find(key: Hashable) -> Hashable:
        root = key
        while leader.setdefault(root, root) != root:
            root = leader[root]
        while leader[key] != root:
            leader[key], key = root, leader[key]
        return root

    placed: list[tuple[_Thing, Hashable]] = []
    for number, thing in enumerate(things):
        first: Hashable = ("thing", number)
        for key in keys_of(thing):
            leader[find(key)] = find(first)
        placed.append((thing, first))
    batches: dict[Hashable, list[_Thing]] = {}
    for thing, first in placed:
        batches.setdefault(find(first), []).append(thing)
    return list(batches.values())


def moving_together(devices: Iterable[PciDevice]) -> list[list[PciDevice]]:
    """Functions in batches: those of one slot and those of one IOMMU group move together."""
    return components(devices, _bonds)


def _bonds(device: PciDevice) -> Iterator[tuple[str, object]]:
    if device.iommu_group is not None:
        yield "group", device.iommu_group
    if device.physical_function is None:
        yield "slot", device.address.slot


_EMPTY = Plan("", ())


class Difference(Value):
    """A difference between a layout and the host."""

    device: str
    """An address, or the name of a vGPU parent; empty for a missing device."""
    name: str
    """Its model."""
    found: str
    wanted: str

    def __str__(self) -> str:
        """`0000:41:00.0 (NVIDIA A40): host (nvidia) -> passthrough (VFIO)`."""
        if not self.device:
            return self.wanted
        name = f" ({self.name})" if self.name else ""
        return f"{self.device}{name}: {self.found} -> {self.wanted}"


class Change(Value):
    """Changes that belong together, for a host as it is."""

    name: str
    """The device that it is listed under; several parts may share one."""
    plan: Plan = _EMPTY
    """What is done first; empty if nothing differs or the part is refused."""
    differences: tuple[Difference, ...] = ()
    diagnostics: tuple[Diagnostic, ...] = ()
    deferred: tuple[str, ...] = ()
    """What is planned after that."""
    groups: frozenset[int] = frozenset()
    """The IOMMU groups of its functions."""
    is_for_guests: bool = False
    """Whether it passes these functions through."""

    @property
    def is_met(self) -> bool:
        """Whether it is in the desired state without objections."""
        return not self.differences and not self.diagnostics


class RuleContext(Value):
    """A rule with its devices, on a host."""

    host: HostSnapshot
    request: ApplyLayout
    checkpoint: LayoutCheckpoint
    claim: RuleMatch
    others: frozenset[PciAddress] = frozenset()
    """The functions of other rules, including their companions."""
    going: frozenset[PciAddress] = frozenset()
    """All functions that some rule passes through: none of them blocks a group for another."""

    def is_shared(self, device: PciDevice) -> bool:
        """Whether another rule has a function of the same slot."""
        return any(other.address in self.others for other in self.host.slot(device))

    @property
    def allow(self) -> frozenset[Override]:
        """The safety checks that the user or the rule overrides."""
        return self.request.allow | frozenset(self.claim.rule.allow)

    def found(
        self, address: PciAddress, *, with_mode: bool = False, with_instances: bool = False
    ) -> SwitchCheckpoint:
        """The state of a function before an interrupted run; empty if there was none."""
        found = next((b for b in self.checkpoint.functions if b.address == address), None)
        if found is None:
            return SwitchCheckpoint()
        return SwitchCheckpoint(
            heterogeneous=found.heterogeneous if with_mode else None,
            autoprobe=found.autoprobe,
            instances=self._instances(found) if with_instances else None,
        )

    def _instances(self, found: FunctionBefore) -> tuple[InstancePlace, ...] | None:
        """The GPU instances to restore, if that run removed some of them."""
        partition = self.host.vgpus.partition_of(str(found.address))
        if partition is None or set(partition.places) == set(found.instances):
            return None
        there = {place.specifier for place in partition.places}
        kept = there.issubset(place.specifier for place in found.instances)
        return found.instances if kept else None

    def owner(self, name: str | None) -> NodeOwner | None:
        """The owner with this name in the layout.

        Raises:
            UsageError: the name was not looked up.
        """
        if name is None:
            return None
        for owner in self.request.owners:
            if owner.name == name:
                return owner
        message = f"the account {name!r} was not looked up"
        raise UsageError(message, "use vfiomgr.layout.named.layout_request")


def attempt(name: str, planned: Callable[[], Plan], differences: tuple[Difference, ...]) -> Change:
    """A part by its plan: with steps, or refused with its differences."""
    try:
        plan = planned()
    except (Refusal, UsageError) as error:
        return Change(name, _EMPTY, differences, diagnostics_of(error))
    is_record = all(isinstance(step, SaveOriginalState | DropOriginalState) for step in plan.steps)
    return Change(name, plan, () if is_record else differences)


def use_of(host: HostSnapshot, device: PciDevice) -> str:
    """The present use of a function: `host (nvidia, 4 virtual functions)`."""
    parts = [device.driver or "no driver"]
    functions = len(device.virtual_functions)
    parts += [counted(functions, "virtual function")] if functions else []
    vgpus = len(vgpus_on(host, device))
    parts += [counted(vgpus, "vGPU")] if vgpus else []
    return f"{'passthrough' if device.is_on_vfio else 'host'} ({', '.join(parts)})"
