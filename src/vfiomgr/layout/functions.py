"""Functions that a rule passes through or gives to the host, and virtual functions to create."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, blocker, diagnostics_of, refuse_if_any
from vfiomgr.engine.plan import Plan, joined
from vfiomgr.errors import Refusal, UsageError
from vfiomgr.gpu import switch
from vfiomgr.gpu.requests import SwitchGpu
from vfiomgr.host.owners import ROOT_ONLY
from vfiomgr.layout.model import Layout, OnDemandRule, PassthroughRule, SriovRule
from vfiomgr.layout.parts import (
    Change,
    Difference,
    RuleContext,
    attempt,
    moving_together,
    select,
    use_of,
)
from vfiomgr.passthrough import plan as passthrough_plan
from vfiomgr.passthrough import reset
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.persistence import plan as persistence_plan
from vfiomgr.sriov import plan as sriov_plan
from vfiomgr.sriov.steps import FunctionsCheckpoint, SetVfCount, SetVirtualFunctions
from vfiomgr.units import counted
from vfiomgr.vgpu.steps import RunSriovManage

if TYPE_CHECKING:
    from vfiomgr.layout.parts import RuleMatch
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


def bind_of(case: RuleContext, rule: PassthroughRule, batch: Iterable[PciDevice]) -> Bind:
    """The bind request of a rule for functions that move together."""
    return Bind(
        tuple(device.address for device in batch),
        driver=rule.driver,
        only=rule.only,
        with_group=rule.with_group,
        allow=case.allow,
        reset_method=rule.reset_method,
        no_d3cold=rule.d3cold is False,
        owner=case.owner(rule.owner),
    )


def to_guests(case: RuleContext, bind: Bind, name: str | None = None) -> Change:
    """Pass functions through, under the name of the first; a divided GPU is made undivided."""
    host = case.host
    devices = [host.device(address) for address in bind.addresses]
    along = passthrough_plan.moved_by(host, bind, case.others)

    def planned() -> Plan:
        plans: list[Plan] = []
        before = host
        for device in devices:
            if not device.is_on_vfio and _is_divided(host, device, with_persistence=True):
                whole = SwitchGpu(
                    device.address, "passthrough", allow=bind.allow, only=case.is_shared(device)
                )
                found = case.found(device.address)
                part, before = switch.brought(before, whole, found, replace(bind, addresses=()))
                plans.append(part)
        bound = passthrough_plan.plan_bind(before, bind, case.going, case.others)
        notes = (*bound.notes, *_unpinned(host, bind, along))
        return joined("", [*plans, replace(bound, notes=notes)])

    part = attempt(name or str(devices[0].address), planned, _passing(case, bind))
    return replace(part, groups=_groups(along), is_for_guests=True)


def to_host(case: RuleContext, batch: Sequence[PciDevice]) -> Change:
    """Return functions to the host; a divided GPU is made undivided."""

    def planned() -> Plan:
        plans: list[Plan] = []
        before = case.host
        ours = {*batch, *case.claim.rest}
        for device in batch:
            is_whole = ours.issuperset(case.host.slot(device))
            if not _is_divided(case.host, device):
                back = Unbind((device.address,), only=not is_whole, allow=case.allow)
                plans.append(passthrough_plan.plan_unbind(before, back))
            else:
                whole = SwitchGpu(device.address, "host", allow=case.allow, only=not is_whole)
                part, before = switch.brought(before, whole, case.found(device.address))
                plans.append(part)
        return joined("", plans)

    part = attempt(str(batch[0].address), planned, differences(case.host, batch, "host"))
    return replace(part, groups=_groups([*batch, *case.claim.rest]))


def _is_divided(host: HostSnapshot, device: PciDevice, *, with_persistence: bool = False) -> bool:
    """Whether it has virtual functions or vGPUs, or persistence mode is still on for them.

    GPU instances of a GPU of the host belong to the host.
    """
    if device.physical_function is not None or device.is_bridge:
        return False
    is_kept = with_persistence and host.users.in_persistence_mode(device.address) is True
    return bool(device.sriov_numvfs) or bool(host.vgpus.of(str(device.address))) or is_kept


def _unpinned(host: HostSnapshot, bind: Bind, devices: Iterable[PciDevice]) -> Iterator[str]:
    """Functions already on VFIO whose settings cannot be pinned."""
    for device in devices:
        if device.is_on_vfio and host.origin(device) is None and reset.repin(device, bind):
            yield f"{device} is already on {device.driver}{reset.unpinned(device, bind)}"


def _groups(devices: Iterable[PciDevice]) -> frozenset[int]:
    return frozenset(d.iommu_group for d in devices if d.iommu_group is not None)


# ---- what differs


def differences(
    host: HostSnapshot, devices: Iterable[PciDevice], wanted: str
) -> tuple[Difference, ...]:
    """The differences of functions from the desired state."""
    return tuple(Difference(str(d.address), d.name, use_of(host, d), wanted) for d in devices)


def _passing(case: RuleContext, bind: Bind) -> tuple[Difference, ...]:
    """The differences of functions for guests.

    Other functions of the same slot are included silently; those with differences of their own, and
    other members of the group, are listed.
    """
    host = case.host
    wanted = passthrough_plan.drivers_for(host, bind, case.others)
    named = [host.device(address) for address in bind.addresses]
    found = [difference for d in named for difference in _of_guest(host, bind, d, wanted)]
    differing = [d for d in named if any(f.device == str(d.address) for f in found)]
    told = {*bind.addresses, *(other.address for d in differing for other in host.slot(d))}
    along = [host.device(address) for address in wanted if address not in told]
    found += [difference for d in along for difference in _of_guest(host, bind, d, wanted)]
    return tuple(found)


def _of_guest(
    host: HostSnapshot, bind: Bind, device: PciDevice, wanted: passthrough_plan.Drivers
) -> Iterator[Difference]:
    is_named = device.address in bind.addresses
    goals = [bind.driver or "VFIO"]
    goals += [f"owner {bind.owner.name}"] if bind.owner else []
    goals += [f"reset_method {bind.reset_method}"] if bind.reset_method and is_named else []
    goals += ["never in D3cold"] if bind.no_d3cold else []
    goal = f"passthrough ({', '.join(goals)})"
    if not is_named:
        goal += f", with {host.device(bind.addresses[0]).address}"
    if not device.is_on_vfio:
        yield Difference(str(device.address), device.name, use_of(host, device), goal)
        return
    otherwise = list(_other_settings(host, bind, device))
    if otherwise or device.driver != wanted[device.address].driver:
        now = f"passthrough ({', '.join([str(device.driver), *otherwise])})"
        yield Difference(str(device.address), device.name, now, goal)


def _other_settings(host: HostSnapshot, bind: Bind, device: PciDevice) -> Iterator[str]:
    """The present owner and settings that differ from the requested ones."""
    if bind.owner is not None:
        wanted = bind.owner.access
        others = [a for a in persistence_plan.accesses(host, device) if a != wanted]
        yield from (f"owner {'root' if a == ROOT_ONLY else a}" for a in others[:1])
    step = reset.repin(device, bind)
    if step is not None and step.before.reset_method != step.after.reset_method:
        yield f"reset_method {step.before.reset_method or 'none'}"
    if step is not None and step.before.d3cold_allowed != step.after.d3cold_allowed:
        yield "may enter D3cold"


_FIRST_RULE = "put this rule first, since the first rule that selects a device has it"
Pending = dict[str, int]
"""The planned number of virtual functions, for physical functions whose number changes."""


def numbers(parts: Iterable[Change]) -> Pending:
    """The planned numbers of virtual functions, which do not exist yet."""
    return {
        str(step.device.address): step.after
        for part in parts
        for step in part.plan.steps
        if isinstance(step, SetVfCount | RunSriovManage)
    }


def is_awaited(host: HostSnapshot, claim: RuleMatch, pending: Pending) -> bool:
    """Whether a rule may concern virtual functions that do not exist yet."""
    select = claim.rule.select
    if not pending.keys().isdisjoint(map(str, select.physical_function)):
        return True
    return bool(pending) and any(host.device_named(str(a)) is None for a in select.address)


def shortage(claim: RuleMatch, claims: Sequence[RuleMatch], pending: Pending) -> Diagnostic | None:
    """The diagnostic for a rule that will have fewer virtual functions than it requires.

    Their addresses, classes and models are not known yet; only their maximum number is.
    """
    select, wanted = claim.rule.select, claim.rule.at_least
    if not select.physical_function:
        return None
    earlier = claims[: claim.number - 1]
    most, told, is_open = 0, [], False
    for address in dict.fromkeys(select.physical_function):
        owner = _owner_of_all(address, earlier)
        if owner is not None:
            told.append(f"those of {address} belong to {owner.label}")
            continue
        is_open = True
        there = sum(device.physical_function == address for device in claim.devices)
        count = pending.get(str(address), there)
        most += count
        text = f"{address} has {counted(count, 'virtual function')}"
        if str(address) in pending:
            maker = next((f" by {other.label}" for other in claims if _is_of(address, other)), "")
            text = f"{address} will have {counted(count, 'virtual function')}{maker}"
        told.append(text)
    if most >= wanted:
        return None
    return blocker(
        "layout-too-few",
        claim.label,
        f"{claim.label} requires at least {counted(wanted, 'device')}, but {', '.join(told)}",
        f"{'increase their number' if is_open else _FIRST_RULE}, or set at_least: {most}",
    )


def _owner_of_all(physical: PciAddress, earlier: Iterable[RuleMatch]) -> RuleMatch | None:
    """The rule that has all virtual functions of a physical function, whatever they are."""
    for claim in earlier:
        rule, select = claim.rule, claim.rule.select
        if select.criteria == ("physical_function",) and physical in select.physical_function:
            return claim
        if isinstance(rule, SriovRule) and rule.functions != "any" and _is_of(physical, claim):
            return claim
    return None


def _is_of(physical: PciAddress, claim: RuleMatch) -> bool:
    return any(device.address == physical for device in claim.devices)


def parts(case: RuleContext, rule: SriovRule, device: PciDevice) -> Iterator[Change]:
    """A physical function with its number, and then the users of its virtual functions."""
    count = device.sriov_totalvfs or 1 if rule.count == "max" else rule.count
    wanted = counted(count, "virtual function")
    each = "" if rule.vf_msix is None else f", {rule.vf_msix} MSI-X vectors each"
    name = str(device.address)

    def numbered() -> Plan:
        found = case.found(device.address, with_instances=count > 0)
        if not device.is_on_vfio and device.sriov_numvfs == count:
            same = SetVirtualFunctions(device.address, count, vectors=rule.vf_msix)
            known = FunctionsCheckpoint(found.autoprobe, instances=found.instances)
            return sriov_plan.plan_set(case.host, same, known)
        refuse_if_any(sriov_plan.impossible(case.host, device, count))
        goal = SwitchGpu(
            device.address,
            "vgpu",
            functions=count,
            allow=case.allow,
            only=case.is_shared(device),
            autoprobe=rule.functions == "host",
            vectors=rule.vf_msix,
        )
        return switch.brought(case.host, goal, found)[0]

    functions = attempt(name, numbered, differences(case.host, [device], wanted + each))
    if device.iommu_group is not None:
        functions = replace(functions, groups=frozenset({device.iommu_group}))
    if rule.functions == "any" or not count:
        yield functions
    elif functions.differences:
        goes_to = "guests" if rule.functions == "passthrough" else "the host's drivers"
        yield replace(functions, deferred=(f"{name}: its {wanted} to {goes_to}",))
    else:
        yield functions
        yield from _virtual(case, rule, device)


def _virtual(case: RuleContext, rule: SriovRule, physical: PciDevice) -> Iterator[Change]:
    """The virtual functions, except those of other rules."""
    name = str(physical.address)
    present = (case.host.device(a) for a in physical.virtual_functions if a not in case.others)
    for batch in moving_together(present):
        addresses = tuple(function.address for function in batch)
        if rule.functions == "host":
            back = Unbind(addresses, allow=case.allow)
            planned = partial(passthrough_plan.plan_unbind, case.host, back)
            part = attempt(name, planned, differences(case.host, batch, "host"))
            yield replace(part, groups=_groups(batch))
            continue
        owner = case.owner(rule.owner)
        bind = Bind(addresses, driver=rule.driver, allow=case.allow, owner=owner)
        yield to_guests(case, bind, name)


def on_demand_notes(host: HostSnapshot, layout: Layout) -> Iterator[str]:
    """The devices that claims bind, and what forbids it at present.

    Raises:
        UsageError: the driver of a rule is no VFIO driver.
    """
    for claim in select(host, layout).claims:
        rule = claim.rule
        if not isinstance(rule, OnDemandRule):
            continue
        free = replace(host, users=host.users.without(rule.stop))
        for device in claim.devices:
            bind = Bind((device.address,), rule.driver, allow=frozenset(rule.allow))
            try:
                passthrough_plan.plan_bind(free, bind)
            except UsageError as error:
                message = f"rule {claim.number}: {error.message}"
                remedy = "correct its driver, or remove it to use vfio-pci"
                raise UsageError(message, remedy) from None
            except Refusal as refused:
                reasons = (each.summary for each in diagnostics_of(refused))
                why = "; ".join(text.replace(f"{device} ", "it ", 1) for text in reasons)
                yield f"on demand: {device}; no ResourceClaim can have it now: {why}"
            else:
                yield f"on demand: {device}; bound while a ResourceClaim has it"
