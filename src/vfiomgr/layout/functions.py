"""Functions that a rule passes through or gives to the host, and virtual functions to create."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, blocker, refuse_if_any
from vfiomgr.engine.plan import Plan, joined
from vfiomgr.gpu import switch
from vfiomgr.gpu.requests import SwitchGpu
from vfiomgr.host.owners import ROOT_ONLY
from vfiomgr.layout.model import SriovRule
from vfiomgr.layout.parts import Change, Difference, RuleContext, attempt, moving_together, use_of
from vfiomgr.passthrough import plan as passthrough_plan
from vfiomgr.passthrough import reset
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.persistence import plan as persistence_plan
from vfiomgr.sriov import plan as sriov_plan
from vfiomgr.sriov.steps import FunctionsCheckpoint, SetVfCount, SetVirtualFunctions
from vfiomgr.units import counted
from vfiomgr.vgpu.steps import RunSriovManage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.host.owners import NodeAccess
    from vfiomgr.layout.model import PassthroughRule, Rule
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


def to_guests(case: RuleContext, bind: Bind) -> Change:
    """Pass functions through; a divided GPU is made undivided first."""
    host = case.host
    devices = [host.device(address) for address in bind.addresses]

    def planned() -> Plan:
        plans: list[Plan] = []
        before = host
        for device in devices:
            if _is_divided(host, device):
                whole = SwitchGpu(
                    device.address,
                    "passthrough",
                    allow=bind.allow,
                    only=case.is_shared(device),
                )
                found = case.found(device.address)
                rest = replace(bind, addresses=())
                part, before = switch.brought(before, whole, found, rest)
                plans.append(part)
        bound = passthrough_plan.plan_bind(before, bind, case.going, case.others)
        return joined(
            "", [*plans, replace(bound, notes=(*bound.notes, *_unpinned(host, bind, along)))]
        )

    along = passthrough_plan.moved_by(host, bind, case.others)
    part = attempt(str(devices[0].address), planned, _passing(case, bind))
    return replace(part, groups=_groups(along), is_for_guests=True)


def to_host(case: RuleContext, batch: Sequence[PciDevice]) -> Change:
    """Return functions to the host; a divided GPU is made undivided."""

    def planned() -> Plan:
        plans: list[Plan] = []
        before = case.host
        ours = {*batch, *case.claim.rest}
        for device in batch:
            is_whole = ours.issuperset(case.host.slot(device))
            if not _has_to_be_made_whole(case.host, device):
                back = Unbind((device.address,), only=not is_whole, allow=case.allow)
                plans.append(passthrough_plan.plan_unbind(before, back))
            else:
                whole = SwitchGpu(
                    device.address,
                    "host",
                    allow=case.allow,
                    only=not is_whole,
                )
                part, before = switch.brought(before, whole, case.found(device.address))
                plans.append(part)
        return joined("", plans)

    part = attempt(str(batch[0].address), planned, differences(case.host, batch, "host"))
    return replace(part, groups=_groups([*batch, *case.claim.rest]))


def virtual_to_guests(case: RuleContext, name: str, bind: Bind) -> Change:
    """Pass virtual functions through together, under the name of their physical function."""

    def planned() -> Plan:
        return passthrough_plan.plan_bind(case.host, bind, case.going, case.others)

    part = attempt(name, planned, _passing(case, bind))
    devices = map(case.host.device, bind.addresses)
    return replace(part, groups=_groups(devices), is_for_guests=True)


def virtual_to_host(case: RuleContext, name: str, batch: Sequence[PciDevice]) -> Change:
    """Return virtual functions to the host drivers, under the name of their physical function."""
    back = Unbind(tuple(function.address for function in batch), allow=case.allow)

    def planned() -> Plan:
        return passthrough_plan.plan_unbind(case.host, back)

    part = attempt(name, planned, differences(case.host, batch, "host"))
    return replace(part, groups=_groups(batch))


def _is_divided(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether it has virtual functions or vGPUs, or is still set up for them."""
    if device.physical_function is not None or device.is_bridge or device.is_on_vfio:
        return False
    is_kept = host.users.in_persistence_mode(device.address) is True
    return bool(device.sriov_numvfs) or bool(host.vgpus.of(str(device.address))) or is_kept


def _has_to_be_made_whole(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether it is divided; GPU instances of a GPU of the host belong to the host."""
    if device.physical_function is not None or device.is_bridge:
        return False
    return bool(device.sriov_numvfs) or bool(host.vgpus.of(str(device.address)))


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
    told = {d.address.slot for d in named if any(f.device == str(d.address) for f in found)}
    along = [host.device(a) for a in wanted if a not in bind.addresses and a.slot not in told]
    found += [difference for d in along for difference in _of_guest(host, bind, d, wanted)]
    return tuple(found)


def _of_guest(
    host: HostSnapshot, bind: Bind, device: PciDevice, wanted: passthrough_plan.Drivers
) -> Iterator[Difference]:
    is_named = device.address in bind.addresses
    goal = f"passthrough ({bind.driver or 'VFIO'}{_listed(_goals(bind, is_named=is_named))})"
    if not is_named:
        goal += f", with {host.device(bind.addresses[0]).address}"
    if not device.is_on_vfio:
        yield Difference(str(device.address), device.name, use_of(host, device), goal)
        return
    otherwise = [*_owner(host, bind, device), *_pins(bind, device)]
    if otherwise or device.driver != wanted[device.address].driver:
        now = f"passthrough ({device.driver}{_listed(otherwise)})"
        yield Difference(str(device.address), device.name, now, goal)


def _goals(bind: Bind, *, is_named: bool) -> Iterator[str]:
    """The settings of a function besides its driver."""
    if bind.owner:
        yield f"owner {bind.owner.name}"
    if bind.reset_method and is_named:
        yield f"reset_method {bind.reset_method}"
    if bind.no_d3cold:
        yield "never in D3cold"


def _owner(host: HostSnapshot, bind: Bind, device: PciDevice) -> Iterator[str]:
    """Its present owner, if that is a different one."""
    if bind.owner is not None:
        wanted = bind.owner.access
        others = [a for a in persistence_plan.accesses(host, device) if a != wanted]
        yield from (f"owner {_named(access)}" for access in others[:1])


def _named(access: NodeAccess) -> str:
    return "root" if access == ROOT_ONLY else str(access)


def _pins(bind: Bind, device: PciDevice) -> Iterator[str]:
    """The settings that differ from the pinned ones."""
    step = reset.repin(device, bind)
    if step is not None and step.before.reset_method != step.after.reset_method:
        yield f"reset_method {step.before.reset_method or 'none'}"
    if step is not None and step.before.d3cold_allowed != step.after.d3cold_allowed:
        yield "may enter D3cold"


def _listed(parts: Iterable[str]) -> str:
    return "".join(f", {part}" for part in parts)


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
    owners = {a: _owner_of_all(a, earlier) for a in select.physical_function}
    counts = {a: 0 if owners[a] else _count(claim, a, pending) for a in owners}
    most = sum(counts.values())
    if most >= wanted:
        return None
    told = [_told(a, owners[a], _maker(a, claims), counts[a], pending) for a in counts]
    remedy = "increase their number" if any(a is None for a in owners.values()) else _FIRST_RULE
    return blocker(
        "layout-too-few",
        claim.label,
        f"{claim.label} requires at least {counted(wanted, 'device')}, but {', '.join(told)}",
        f"{remedy}, or set at_least: {most}",
    )


def _owner_of_all(physical: PciAddress, earlier: Iterable[RuleMatch]) -> RuleMatch | None:
    """The rule that has all virtual functions of a physical function, whatever they are."""
    for claim in earlier:
        select = claim.rule.select
        is_all = select.criteria == ("physical_function",) and physical in select.physical_function
        if is_all or (_says_who_has_them(claim.rule) and _is_of(physical, claim)):
            return claim
    return None


def _says_who_has_them(rule: Rule) -> bool:
    return isinstance(rule, SriovRule) and rule.functions != "any"


def _is_of(physical: PciAddress, claim: RuleMatch) -> bool:
    return any(device.address == physical for device in claim.devices)


def _count(claim: RuleMatch, physical: PciAddress, pending: Pending) -> int:
    there = sum(device.physical_function == physical for device in claim.devices)
    return pending.get(str(physical), there)


def _maker(physical: PciAddress, claims: Iterable[RuleMatch]) -> str:
    """The rule that changes the number of a physical function's virtual functions."""
    makers = (claim.label for claim in claims if _is_of(physical, claim))
    return next((f" by {label}" for label in makers), "")


def _told(
    physical: PciAddress, owner: RuleMatch | None, maker: str, count: int, pending: Pending
) -> str:
    if owner is not None:
        return f"those of {physical} belong to {owner.label}"
    if str(physical) in pending:
        return f"{physical} will have {counted(count, 'virtual function')}{maker}"
    return f"{physical} has {counted(count, 'virtual function')}"


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
        if rule.functions == "host":
            yield virtual_to_host(case, name, batch)
            continue
        bind = Bind(
            tuple(function.address for function in batch),
            driver=rule.driver,
            allow=case.allow,
            owner=case.owner(rule.owner),
        )
        yield virtual_to_guests(case, name, bind)
