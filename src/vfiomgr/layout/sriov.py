"""Virtual functions that a layout will create, and the rules about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, blocker, refuse_if_any
from vfiomgr.gpu import switch
from vfiomgr.gpu.requests import SwitchGpu
from vfiomgr.layout.functions import differences, virtual_to_guests, virtual_to_host
from vfiomgr.layout.model import SriovRule
from vfiomgr.layout.parts import Change, RuleContext, attempt, counted
from vfiomgr.layout.select import moving_together
from vfiomgr.passthrough.requests import Bind
from vfiomgr.sriov import plan as sriov_plan
from vfiomgr.sriov.requests import FunctionsCheckpoint, SetVirtualFunctions
from vfiomgr.sriov.steps import SetVfCount
from vfiomgr.vgpu.mig.steps import RunSriovManage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.engine.plan import Plan
    from vfiomgr.layout.model import Rule
    from vfiomgr.layout.select import RuleMatch
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


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
    name = str(device.address)

    def numbered() -> Plan:
        found = case.found(device.address, with_instances=count > 0)
        if not device.is_on_vfio and device.sriov_numvfs == count:
            same = SetVirtualFunctions(device.address, count)
            known = FunctionsCheckpoint(found.autoprobe, instances=found.instances)
            return sriov_plan.plan_set(case.host, same, known)
        refuse_if_any(sriov_plan.impossible(case.host, device, count), frozenset())
        goal = SwitchGpu(
            device.address,
            "vgpu",
            functions=count,
            allow=case.allow,
            only=case.is_shared(device),
            autoprobe=rule.functions == "host",
        )
        return switch.brought(case.host, goal, found)[0]

    functions = attempt(name, numbered, differences(case.host, [device], wanted))
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
