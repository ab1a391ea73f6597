"""Compares a layout with a host: the differences, and the plan that resolves them.

A layout is planned by the planners of `bind`, `unbind`, `vgpu` and `sriov`, whose remedies name the
options of these commands. In a layout, the keys of its rules are named instead.

The devices of each rule are compared in parts that can be changed separately: the functions of one
slot or IOMMU group, a physical function with its virtual ones, the GPUs that share a rule's vGPUs.
A part in the desired state has no steps, even if it is in use. What concerns functions that do not
exist yet is planned once they do; `deferred` of the parts describes it.

Rules may share IOMMU groups: a guest gets an entire group, with one owner.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, assert_never

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, Option, OptionName, Remedy, blocker, refuse_if_any
from vfiomgr.engine.plan import FIRST, LAST, Plan, Step, distinct
from vfiomgr.engine.registry import plans, resolves
from vfiomgr.layout import adopt, functions, vgpus
from vfiomgr.layout.model import (
    HostRule,
    OnDemandRule,
    PassthroughRule,
    SriovRule,
    VgpuRule,
    WholeRule,
)
from vfiomgr.layout.parts import (
    Change,
    Difference,
    RuleContext,
    RuleMatch,
    components,
    moving_together,
    select,
)
from vfiomgr.layout.requests import ApplyLayout, FunctionBefore, LayoutCheckpoint
from vfiomgr.passthrough.plan import ends_at_reboot, goes_along
from vfiomgr.passthrough.steps import AwaitVfioNode, Bind
from vfiomgr.pci.iommu import blockers
from vfiomgr.pci.model import PciAddress, PciDevice
from vfiomgr.persistence.installed_layout import RECORD, layout_name
from vfiomgr.persistence.steps import LoadModule, ReplaceFile
from vfiomgr.sriov.steps import SetAutoprobe
from vfiomgr.units import counted
from vfiomgr.value import Value
from vfiomgr.vgpu.instance_plan import present_instances
from vfiomgr.vgpu.model import MARKS, mark_file, mark_of
from vfiomgr.vgpu.steps import (
    RunSriovManage,
    SetGpuInstances,
    SetHeterogeneous,
    SetMig,
    SetPersistence,
)

if TYPE_CHECKING:
    from vfiomgr.host.owners import NodeAccess
    from vfiomgr.layout.model import Rule
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
        rule = self.claim.rule
        if self.is_for_guests and isinstance(rule, PassthroughRule | SriovRule):
            return rule.owner
        return None

    @property
    def takes_group(self) -> bool:
        """Whether the entire group is passed through."""
        rule = self.claim.rule
        return isinstance(rule, PassthroughRule) and rule.with_group


def rules_by_function(
    host: HostSnapshot, claims: Iterable[RuleMatch]
) -> dict[PciAddress, RuleMatch]:
    """The rule of each function: the first that selects it, or else the first that includes it."""
    claims = tuple(claims)
    found = {device.address: claim for claim in claims for device in claim.devices}
    for claim in claims:
        for device in _along(host, claim):
            found.setdefault(device.address, claim)
    return found


def passed_through(host: HostSnapshot, claims: Iterable[RuleMatch]) -> frozenset[PciAddress]:
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
    if not isinstance(rule, WholeRule):
        return
    whole = claim.devices
    if isinstance(rule, OnDemandRule) or not rule.only:
        whole = tuple(other for device in claim.devices for other in host.slot(device))
        yield from whole
    if isinstance(rule, PassthroughRule) and rule.with_group:
        for number in dict.fromkeys(device.iommu_group for device in whole):
            members = host.group_members(number)
            yield from (d for d in members if goes_along(d))


def group_conflicts(
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
        if isinstance(rule, WholeRule):
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


def with_conflicts(
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


def changed_together(host: HostSnapshot, parts: Iterable[Change]) -> tuple[tuple[str, ...], ...]:
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


_KEYS: dict[OptionName, str] = {
    "allow": "set allow: {}",
    "not-driver": "remove driver",
    "heterogeneous": "with heterogeneous: true",
    "not-heterogeneous": "remove heterogeneous: true",
    "sizes": "set heterogeneous: true",
    "not-uuid": "remove it from uuids",
    "type": "type: {}",
    "mig": "set mig: true",
    "not-mig": "set mig: false",
    "unbind-group": "add a host rule",
}
_KEYS_OF_PASSTHROUGH: dict[OptionName, str] = {
    "only": "exclude it with only: true",
    "not-only": "remove only: true",
    "function-only": "only: true",
    "with-group": "set with_group: true to include them",
}
_KEYS_OF_OTHERS: dict[OptionName, str] = {
    "with-group": "select them in a passthrough rule too",
}
"""Rules of these states have none of these keys."""


def in_terms_of(rule: Rule, part: Change) -> Change:
    """A part of a rule, with its options in the words of the layout."""
    own = partial(words, rule)
    return replace(
        part,
        diagnostics=tuple(one.in_words(own) for one in part.diagnostics),
        plan=part.plan.in_words(own),
    )


def words(rule: Rule, option: Option) -> str | None:
    """The key of a rule for an option; None if a rule of its state has no such key."""
    if (option.name, option.value) == ("allow", "in-use"):  # no file can know it
        return "apply with --allow in-use"
    own = _KEYS_OF_PASSTHROUGH if rule.state == "passthrough" else _KEYS_OF_OTHERS
    key = own.get(option.name) or _KEYS.get(option.name)
    return None if key is None else key.format(option.value)


class Comparison(Value):
    """The result of the comparison: all parts, and reasons against the entire layout."""

    parts: tuple[Change, ...]
    diagnostics: tuple[Diagnostic, ...]
    deferred: tuple[str, ...] = ()
    """What rules say about virtual functions that do not exist yet."""
    bundles: tuple[tuple[str, ...], ...] = ()
    """The names of differing parts; names in one tuple are changed together."""

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All differences, including missing devices."""
        missing = (Difference("", "", "missing", o.summary) for o in self.diagnostics)
        return (*missing, *(d for part in self.parts for d in _told(part)))

    def left_of(self, name: str) -> tuple[str, ...]:
        """The remaining differences of a device, as text."""
        return tuple(str(d) for part in self.parts if part.name == name for d in _told(part))


def _told(part: Change) -> Iterator[Difference]:
    """The differences of a part; a refused part counts as different."""
    yield from part.differences
    if not part.differences:
        for diagnostic in part.diagnostics:
            yield Difference(part.name, "", diagnostic.summary, "as the layout says")


@plans(ApplyLayout)
def plan_layout(
    host: HostSnapshot, request: ApplyLayout, checkpoint: LayoutCheckpoint | None = None
) -> Plan:
    """The steps to a layout; refused completely if a part of it is refused.

    Raises:
        Refusal: all reasons against it, of all parts.
    """
    compared = compare(host, request, checkpoint)
    return plan_of(host, request, compared, checkpoint)


def plan_of(
    host: HostSnapshot,
    request: ApplyLayout,
    compared: Comparison,
    checkpoint: LayoutCheckpoint | None = None,
) -> Plan:
    """The steps to a layout that was already compared with the host.

    Raises:
        UsageError: the driver of an on-demand rule is no VFIO driver.
        Refusal: all reasons against it, of all parts.
    """
    parts = [part for part in compared.parts if not request.only or part.name in request.only]
    if not request.only:
        refuse_if_any(compared.diagnostics)
    refused = [diagnostic for part in parts for diagnostic in part.diagnostics]
    refuse_if_any(refused)
    steps, numbers = in_parallel_groups(parts)
    leftovers = [] if checkpoint is None else [*_leftovers(host, checkpoint, steps)]
    right = sum(part.is_met for part in parts)
    which = f" to {', '.join(request.only)}" if request.only else ""
    return Plan(
        summary=f"apply the layout {request.name}{which}",
        steps=(*steps, *leftovers),
        locks=tuple(sorted({lock for part in parts for lock in part.plan.locks})),
        notes=(
            *distinct(note for part in parts for note in part.plan.notes),
            *(() if request.only else functions.on_demand_notes(host, request.layout)),
            *(_binders(host, request) if request.adopt else ()),
        ),
        alternatives=distinct(one for part in parts for one in part.plan.alternatives),
        already=(_already(right, len(parts)),) if right else (),
        resolves=distinct(name for part in parts for name in part.plan.resolves),
        deferred=(
            *(text for part in parts for text in part.deferred),
            *(() if request.only else compared.deferred),
        ),
        parallel_groups=(*numbers, *(max(numbers, default=0) + 1 for _ in leftovers)),
    )


def _binders(host: HostSnapshot, request: ApplyLayout) -> Iterator[str]:
    claims = select(host, request.layout).claims
    return adopt.binders(host, passed_through(host, claims))


def compare(
    host: HostSnapshot, request: ApplyLayout, checkpoint: LayoutCheckpoint | None = None
) -> Comparison:
    """Compare everything that a layout concerns; nothing is refused here."""
    selection = select(host, request.layout)
    claims = selection.claims
    held = rules_by_function(host, claims)
    found = [
        in_terms_of(case.claim.rule, part)
        for case in _cases(host, request, claims, held, checkpoint)
        for part in _parts(case)
    ]
    clashes = group_conflicts(host, request, claims, held)
    parts = with_conflicts(host, found, clashes)
    pending = functions.numbers(parts)
    waiting = [c for c in claims if functions.is_awaited(host, c, pending)]
    diagnostics = [*selection.diagnostics]
    diagnostics += [short for short in selection.shortages if short[0] not in waiting]
    for claim in waiting:
        shortage = functions.shortage(claim, claims, pending)
        diagnostics += [(claim, shortage)] if shortage is not None else []
    parts = tuple(part for part in parts if _divider(host, part) not in pending)
    against = [diagnostic for _, diagnostic in diagnostics]
    return Comparison(
        _at_boot(host, request, parts, against),
        tuple(diagnostic for _, diagnostic in sorted(diagnostics, key=lambda one: one[0].number)),
        tuple(f"{claim.label}: {claim.rule.state}" for claim in waiting),
        changed_together(host, parts),
    )


def _cases(
    host: HostSnapshot,
    request: ApplyLayout,
    claims: Sequence[RuleMatch],
    held: Mapping[PciAddress, RuleMatch],
    checkpoint: LayoutCheckpoint | None = None,
) -> Iterator[RuleContext]:
    """Each rule, with what it needs to know of the others."""
    going = passed_through(host, claims)
    known = checkpoint or LayoutCheckpoint()
    for claim in claims:
        others = frozenset(a for a, holder in held.items() if holder is not claim)
        yield RuleContext(host, request, known, claim, others, going)


_AT_BOOT = Remedy("apply the layout at the next boot: vfiomgr layout install FILE")


def _at_boot(
    host: HostSnapshot,
    request: ApplyLayout,
    parts: tuple[Change, ...],
    others: Iterable[Diagnostic],
) -> tuple[Change, ...]:
    """The parts, with the next boot as a remedy if a boot ends all reasons against the layout."""
    found = (*others, *(diagnostic for part in parts for diagnostic in part.diagnostics))
    is_installed = host.files.text(RECORD) is not None and layout_name(host) == request.name
    if is_installed or not all(ends_at_reboot(host, one) for one in found):
        return parts
    return tuple(
        replace(
            part,
            diagnostics=tuple(
                replace(one, remedies=(*one.remedies, _AT_BOOT)) for one in part.diagnostics
            ),
        )
        for part in parts
    )


def _divider(host: HostSnapshot, part: Change) -> str | None:
    device = host.device_named(part.name)
    return None if device is None or not device.physical_function else str(device.physical_function)


@resolves(ApplyLayout)
def resolve(
    host: HostSnapshot, request: ApplyLayout, checkpoint: LayoutCheckpoint | None = None
) -> LayoutCheckpoint:
    """Find the facts that exist only before the layout is applied."""
    checkpoint = checkpoint or LayoutCheckpoint()
    known = {function.address for function in checkpoint.functions}
    found: list[FunctionBefore] = []
    for claim in select(host, request.layout).claims:
        names = {str(device.address) for device in claim.devices}
        if request.only and names.isdisjoint(request.only):
            continue
        for device in claim.devices:
            if device.sriov_totalvfs and device.address not in known:
                mode = host.vgpus.mode_of(device)
                mixes = None if mode is None else mode.heterogeneous
                autoprobe = device.sriov_drivers_autoprobe
                instances = present_instances(host, device)
                found.append(FunctionBefore(device.address, autoprobe, mixes, instances))
    return replace(checkpoint, functions=(*checkpoint.functions, *found))


def _already(right: int, parts: int) -> str:
    if right == parts:
        return f"everything is already in the desired state ({counted(parts, 'part')})"
    return (
        f"{right} of {counted(parts, 'part')} {'is' if right == 1 else 'are'} already in the "
        "desired state"
    )


def _parts(case: RuleContext) -> Iterator[Change]:
    match case.claim.rule:
        case PassthroughRule() as rule:
            for batch in moving_together(case.claim.devices):
                yield functions.to_guests(case, functions.bind_of(case, rule, batch))
        case HostRule():
            for batch in moving_together(case.claim.devices):
                yield functions.to_host(case, batch)
        case OnDemandRule():
            return  # they are on either driver, as claims need them
        case SriovRule() as rule:
            for device in case.claim.devices:
                yield from functions.parts(case, rule, device)
        case VgpuRule() as rule:
            if case.claim.devices or case.claim.parents:
                yield from vgpus.parts(case, rule)
        case _ as never:
            assert_never(never)


def binds(host: HostSnapshot, request: ApplyLayout) -> Iterator[tuple[Bind, frozenset[PciAddress]]]:
    """The bind requests of a layout's passthrough rules, each with the devices of other rules."""
    claims = select(host, request.layout).claims
    for case in _cases(host, request, claims, rules_by_function(host, claims)):
        if isinstance(case.claim.rule, PassthroughRule):
            for batch in moving_together(case.claim.devices):
                yield functions.bind_of(case, case.claim.rule, batch), case.others


# ---- what a run that was cut off left


def _leftovers(
    host: HostSnapshot, checkpoint: LayoutCheckpoint, steps: Sequence[object]
) -> Iterator[ReplaceFile | SetAutoprobe]:
    """Marks and settings that no other step of the plan restores."""
    written = {step.path for step in steps if isinstance(step, ReplaceFile)}
    there = {vgpu.name: vgpu for vgpu in host.vgpus.active}
    marks = {mark.path: mark.text for mark in host.vgpus.marks}
    for name in checkpoint.begun:
        vgpu, file = there.get(name), MARKS / name
        before, after = marks.get(file), None if vgpu is None else mark_of(vgpu)
        is_marked = bool(before and after and before.startswith(after))  # perhaps as adopted
        if file not in written and before != after and not is_marked:
            yield ReplaceFile(file if vgpu is None else mark_file(vgpu), before, after)
    settings = {step.device.address for step in steps if isinstance(step, SetAutoprobe)}
    for found in checkpoint.functions:
        device = host.device_named(str(found.address))
        if device is None or found.autoprobe is None or found.address in settings:
            continue
        now = device.sriov_drivers_autoprobe
        if now is not None and now is not found.autoprobe:
            yield SetAutoprobe(device.identity, before=now, after=found.autoprobe)
