"""Rules of a layout that share IOMMU groups: a guest gets an entire group, with one owner."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, blocker
from vfiomgr.engine.plan import FIRST, LAST, Plan
from vfiomgr.layout.model import PassthroughRule, SriovRule
from vfiomgr.layout.parts import RuleMatch, components
from vfiomgr.passthrough.steps import AwaitVfioNode
from vfiomgr.pci.iommu import blockers
from vfiomgr.pci.model import PciDevice
from vfiomgr.persistence.steps import LoadModule
from vfiomgr.value import Value
from vfiomgr.vgpu.steps import (
    RunSriovManage,
    SetGpuInstances,
    SetHeterogeneous,
    SetMig,
    SetPersistence,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    from vfiomgr.engine.plan import Step
    from vfiomgr.host.owners import NodeAccess
    from vfiomgr.layout.parts import Change
    from vfiomgr.layout.requests import ApplyLayout
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot

    Holders = Mapping[PciAddress, RuleMatch]


_REMEDY = (
    "an entire IOMMU group goes to one guest: give its functions one state, or move a device to a "
    "slot with a group of its own"
)


class _Request(Value):
    """What a rule requests for one function."""

    claim: RuleMatch
    device: PciDevice
    is_for_guests: bool

    @property
    def owner(self) -> str | None:
        """The owner of its node besides root."""
        return getattr(self.claim.rule, "owner", None) if self.is_for_guests else None

    @property
    def takes_group(self) -> bool:
        """Whether the entire group is passed through."""
        rule = self.claim.rule
        return isinstance(rule, PassthroughRule) and rule.with_group


def holders(host: HostSnapshot, claims: Iterable[RuleMatch]) -> dict[PciAddress, RuleMatch]:
    """The rule of each function: the first that selects it, or else the first that includes it."""
    claims = tuple(claims)
    found = {device.address: claim for claim in claims for device in claim.devices}
    for claim in claims:
        for device in _along(host, claim):
            found.setdefault(device.address, claim)
    return found


def going(host: HostSnapshot, claims: Iterable[RuleMatch]) -> frozenset[PciAddress]:
    """All functions that rules pass through, including companions."""
    found: set[PciAddress] = set()
    for claim in claims:
        match claim.rule:
            case PassthroughRule():
                found.update(device.address for device in (*claim.devices, *_along(host, claim)))
            case SriovRule(functions="passthrough"):
                found.update(address for d in claim.devices for address in d.virtual_functions)
    return frozenset(found)


def _along(host: HostSnapshot, claim: RuleMatch) -> Iterator[PciDevice]:
    """Functions passed through with a rule's devices: the rest of their slots and groups."""
    rule = claim.rule
    if not isinstance(rule, PassthroughRule):
        return
    whole = claim.devices
    if not rule.only:
        whole = tuple(other for device in claim.devices for other in host.slot(device))
        yield from whole
    if rule.with_group:
        for number in dict.fromkeys(device.iommu_group for device in whole):
            yield from (d for d in host.group_members(number) if not d.is_bridge)


def clashes(
    host: HostSnapshot, request: ApplyLayout, claims: Sequence[RuleMatch], held: Holders
) -> dict[int, Diagnostic]:
    """By group: two rules with contradicting requests."""
    by_group: dict[int, list[_Request]] = {}
    for one in _requests(host, claims, held) if len(claims) > 1 else ():
        if one.device.iommu_group is not None and not one.device.is_bridge:
            by_group.setdefault(one.device.iommu_group, []).append(one)
    access = {owner.name: owner.access for owner in request.owners}
    found: dict[int, Diagnostic] = {}
    for number, requests in by_group.items():
        for one, other in itertools.combinations(requests, 2):
            if number not in found and one.claim is not other.claim:
                against = _in_two_states(host, number, one, other)
                against = against or _of_two_owners(number, one, other, access)
                found |= {number: against} if against is not None else {}
    return found


def _requests(host: HostSnapshot, claims: Iterable[RuleMatch], held: Holders) -> Iterator[_Request]:
    for claim in claims:
        rule = claim.rule
        if isinstance(rule, PassthroughRule):
            gone = dict.fromkeys((*claim.devices, *_along(host, claim)))
            own = (device for device in gone if held[device.address] is claim)
            yield from (_Request(claim, device, is_for_guests=True) for device in own)
            continue
        kept = (*claim.devices, *claim.rest)
        yield from (_Request(claim, device, is_for_guests=False) for device in kept)
        if isinstance(rule, SriovRule) and rule.functions != "any":
            goes = rule.functions == "passthrough"
            for address in (a for physical in claim.devices for a in physical.virtual_functions):
                device = host.device_named(str(address))
                if device is not None and held.get(address, claim) is claim:
                    yield _Request(claim, device, is_for_guests=goes)


def _in_two_states(
    host: HostSnapshot, number: int, one: _Request, other: _Request
) -> Diagnostic | None:
    if one.is_for_guests is other.is_for_guests:
        return None
    guest, kept = (one, other) if one.is_for_guests else (other, one)
    is_to_be = f"{kept.device} is {kept.claim.rule.state} in {kept.claim.label}"
    if guest.takes_group:
        goes = f"{guest.claim.label} includes it with IOMMU group {number} (with_group)"
    elif _will_block(host, kept.device):
        goes = f"{guest.device} of the same IOMMU group {number} is passthrough"
        goes += f" in {guest.claim.label}"
    else:
        return None
    return blocker("layout-group-split", kept.device, f"{is_to_be}, but {goes}", _REMEDY)


def _will_block(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether a function of the host blocks passthrough of its group, by its driver."""
    if not device.is_on_vfio:
        return bool(blockers([device]))
    origin = host.origin(device)
    return origin is None or origin.state.driver is not None


def _of_two_owners(
    number: int, one: _Request, other: _Request, access: Mapping[str, NodeAccess]
) -> Diagnostic | None:
    """The node of a group has one owner; two rules would change it back and forth."""
    if one.owner is None or other.owner is None:
        return None
    if access.get(one.owner, one.owner) == access.get(other.owner, other.owner):
        return None
    told = [f"{w.claim.label} gives it to {w.owner} (for {w.device.address})" for w in (one, other)]
    return blocker(
        "layout-group-owners",
        number,
        f"IOMMU group {number} has only one node: {', but '.join(told)}",
        "give all functions of the group one owner, or set owner in only one of the rules",
    )


def judged(
    host: HostSnapshot, parts: Sequence[Change], clashing: Mapping[int, Diagnostic]
) -> tuple[Change, ...]:
    """The parts, refused if rules clash or if a guest could not have a group after all."""
    found: list[Change] = []
    for part in parts:
        against = [clashing[number] for number in sorted(part.groups & clashing.keys())]
        found.append(_refused(part, against))
    incomplete = {
        number: part
        for part in found
        if part.is_for_guests and part.diagnostics
        for number in part.groups
        if not host.is_viable(number)
    }
    return tuple(_waiting(part, incomplete) for part in found)


def _refused(part: Change, diagnostics: Sequence[Diagnostic]) -> Change:
    if not diagnostics:
        return part
    every = (*part.diagnostics, *diagnostics)
    return replace(part, plan=Plan("", ()), diagnostics=every, deferred=())


def _waiting(part: Change, incomplete: Mapping[int, Change]) -> Change:
    """A part that passes through a group whose rest belongs to a refused part."""
    if not part.is_for_guests or part.diagnostics or not part.differences:
        return part
    against = [
        blocker(
            "layout-group-refused",
            number,
            f"IOMMU group {number} can only be passed through entirely, and its part "
            f"{incomplete[number].name} is refused",
            incomplete[number].diagnostics[0].hint,
        )
        for number in sorted(part.groups & incomplete.keys())
    ]
    return _refused(part, against)


def bundles(host: HostSnapshot, parts: Iterable[Change]) -> tuple[tuple[str, ...], ...]:
    """The names of parts that are changed in one run: what a guest can only have together."""

    def bonds(part: Change) -> Iterator[Hashable]:
        yield part.name
        if part.is_for_guests:
            yield from (number for number in part.groups if not host.is_viable(number))

    found = components((part for part in parts if not part.is_met), bonds)
    return tuple(tuple(dict.fromkeys(part.name for part in batch)) for batch in found)


_PROGRAMS = "NVIDIA's programs"
"""They run one after the other, since they share state of the driver."""


def in_parallel_groups(parts: Iterable[Change]) -> tuple[tuple[Step, ...], tuple[int, ...]]:
    """All steps with a number for each; modules are loaded once, before everything else.

    A group that the kernel assigns late may have members in any part, so it is examined at the end.
    """
    moving = [part for part in parts if part.plan.steps]
    all_steps = [step for part in moving for step in part.plan.steps]
    steps: list[Step] = list(dict.fromkeys(s for s in all_steps if isinstance(s, LoadModule)))
    numbers = [FIRST] * len(steps)
    last: list[Step] = []
    for number, together in enumerate(components(moving, _bonds), start=1):
        for part in together:
            rest = [step for step in part.plan.steps if not isinstance(step, LoadModule)]
            late = (isinstance(s, AwaitVfioNode) and s.group is None for s in rest)
            end = next((at for at, waits in enumerate(late) if waits), len(rest))
            steps += rest[:end]
            numbers += [number] * end
            last += rest[end:]
    return (*steps, *last), (*numbers, *[LAST] * len(last))


def _bonds(part: Change) -> frozenset[str]:
    """Its locks, and a common one for all that run programs of NVIDIA's."""
    programs = RunSriovManage | SetGpuInstances | SetHeterogeneous | SetMig | SetPersistence
    has_programs = any(isinstance(step, programs) for step in part.plan.steps)
    return frozenset({*part.plan.locks, *({_PROGRAMS} if has_programs else ())})
