"""Virtual functions that a layout is yet to make, and the rules that are about them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.model.gpu_step import RunSriovManage
from vfiomgr.model.layout import SriovRule
from vfiomgr.model.step import SetVfCount
from vfiomgr.planner.guards import Objection
from vfiomgr.planner.layout_part import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vfiomgr.model.layout import Rule
    from vfiomgr.model.pci import PciAddress
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.planner.layout_part import Part
    from vfiomgr.planner.selection import Claim

_FIRST_RULE = "put this rule first, since the first rule that selects a device has it"
Coming = dict[str, int]
"""How many virtual functions each physical one will have, of those that are to get others."""


def numbers(parts: Iterable[Part]) -> Coming:
    """What plans make of physical functions; of the new virtual ones nothing is known yet."""
    return {
        str(step.device.address): step.after
        for part in parts
        for step in part.plan.steps
        if isinstance(step, SetVfCount | RunSriovManage)
    }


def is_awaited(host: HostSnapshot, claim: Claim, coming: Coming) -> bool:
    """Whether a rule may be about virtual functions that are yet to be made."""
    select = claim.rule.select
    if not coming.keys().isdisjoint(map(str, select.physical_function)):
        return True
    return bool(coming) and any(host.device_named(str(a)) is None for a in select.address)


def shortage(claim: Claim, claims: Sequence[Claim], coming: Coming) -> Objection | None:
    """That a rule's physical functions will have fewer virtual ones than it wants.

    Which addresses, classes and models these will have is not known; only how many there may be.
    """
    select, wanted = claim.rule.select, claim.rule.at_least
    if not select.physical_function:
        return None
    earlier = claims[: claim.number - 1]
    owners = {a: _owner_of_all(a, earlier) for a in select.physical_function}
    counts = {a: 0 if owners[a] else _count(claim, a, coming) for a in owners}
    most = sum(counts.values())
    if most >= wanted:
        return None
    told = [_told(a, owners[a], _maker(a, claims), counts[a], coming) for a in counts]
    remedy = "have more made there" if any(a is None for a in owners.values()) else _FIRST_RULE
    return Objection(
        f"{claim.label} wants at least {counted(wanted, 'device')}, and {', '.join(told)}",
        f"{remedy}, or say at_least: {most}",
    )


def _owner_of_all(physical: PciAddress, earlier: Iterable[Claim]) -> Claim | None:
    """The rule that has all virtual functions of a physical one, whatever they are."""
    for claim in earlier:
        select = claim.rule.select
        is_all = select.criteria == ("physical_function",) and physical in select.physical_function
        if is_all or (_says_who_has_them(claim.rule) and _is_of(physical, claim)):
            return claim
    return None


def _says_who_has_them(rule: Rule) -> bool:
    return isinstance(rule, SriovRule) and rule.functions != "any"


def _is_of(physical: PciAddress, claim: Claim) -> bool:
    return any(device.address == physical for device in claim.devices)


def _count(claim: Claim, physical: PciAddress, coming: Coming) -> int:
    there = sum(device.physical_function == physical for device in claim.devices)
    return coming.get(str(physical), there)


def _maker(physical: PciAddress, claims: Iterable[Claim]) -> str:
    """By which rule a physical function gets others."""
    makers = (claim.label for claim in claims if _is_of(physical, claim))
    return next((f" by {label}" for label in makers), "")


def _told(physical: PciAddress, owner: Claim | None, maker: str, count: int, coming: Coming) -> str:
    if owner is not None:
        return f"those of {physical} are what {owner.label} has"
    if str(physical) in coming:
        return f"{physical} is to have {counted(count, 'virtual function')}{maker}"
    return f"{physical} has {counted(count, 'virtual function')}"
