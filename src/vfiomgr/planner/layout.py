"""A layout against a host: what differs, and the plan that ends the difference.

Each rule's devices are looked at in parts that can be changed by themselves: the functions of one
slot or IOMMU group, a physical function with its virtual ones, the GPUs that share a rule's vGPUs.
A part that is as wanted has no steps, whoever uses it. What concerns functions that do not exist
yet is planned once they do; the parts' `later` tells of it beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, assert_never

from vfiomgr.model.gpu_step import RunSriovManage
from vfiomgr.model.host_step import ReplaceFile
from vfiomgr.model.intent import Bind, FunctionBefore, SetVirtualFunctions, SwitchGpu, Unbind
from vfiomgr.model.layout import HostRule, PassthroughRule, SriovRule, VgpuRule
from vfiomgr.model.plan import Plan
from vfiomgr.model.step import SetAutoprobe, SetVfCount
from vfiomgr.model.vgpu_mark import MARKS, mark_file, mark_of
from vfiomgr.planner import gpu_instances, guards, layout_vgpus, passthrough, sriov, switch
from vfiomgr.planner.guards import Objection
from vfiomgr.planner.layout_lanes import in_lanes
from vfiomgr.planner.layout_part import Case, Difference, Part, attempt, counted, use_of
from vfiomgr.planner.selection import Claim, moving_together, select

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.model.intent import ApplyLayout
    from vfiomgr.model.pci import PciAddress, PciDevice
    from vfiomgr.model.snapshot import HostSnapshot


@dataclass(frozen=True, slots=True)
class Comparison:
    """A layout and a host: all parts, and what speaks against the layout as a whole."""

    parts: tuple[Part, ...]
    objections: tuple[Objection, ...]
    later: tuple[str, ...] = ()
    """What rules say of virtual functions that are yet to be made."""

    @property
    def differences(self) -> tuple[Difference, ...]:
        """What is not as wanted; a device that is missing is one as well."""
        missing = (Difference("", "", "missing", o.reason) for o in self.objections)
        return (*missing, *(d for part in self.parts for d in _told(part)))


def _told(part: Part) -> Iterator[Difference]:
    """What differs in a part; what is refused differs, whatever else is known of it."""
    yield from part.differences
    if not part.differences:
        for objection in part.objections:
            yield Difference(part.name, "", objection.reason, "as the layout says")


def plan_layout(host: HostSnapshot, intent: ApplyLayout) -> Plan:
    """The steps to a layout, refused whole where a part of it cannot be.

    Raises:
        Refusal: all that speaks against it, of all parts.

    """
    return plan_of(host, intent, compare(host, intent))


def plan_of(host: HostSnapshot, intent: ApplyLayout, compared: Comparison) -> Plan:
    """The same, where the two have been compared already.

    Raises:
        Refusal: all that speaks against it, of all parts.

    """
    parts = [part for part in compared.parts if not intent.only or part.name in intent.only]
    if not intent.only:
        guards.refuse_if_any(compared.objections, frozenset())
    refused = [objection for part in parts for objection in part.objections]
    guards.refuse_if_any(refused, frozenset())
    steps, lanes = in_lanes(parts)
    leftovers = [] if intent.only else [*_leftovers(host, intent, steps)]
    right = sum(not part.differences for part in parts)
    return Plan(
        summary=f"apply the layout {intent.name}",
        steps=(*steps, *leftovers),
        locks=tuple(sorted({lock for part in parts for lock in part.plan.locks})),
        notes=_distinct(note for part in parts for note in part.plan.notes),
        already=(_already(right, len(parts)),) if right else (),
        settles=_distinct(name for part in parts for name in part.plan.settles),
        later=(
            *(text for part in parts for text in part.later),
            *(() if intent.only else compared.later),
        ),
        lanes=(*lanes, *(max(lanes, default=0) + 1 for _ in leftovers)),
    )


def compare(host: HostSnapshot, intent: ApplyLayout) -> Comparison:
    """Look at all that a layout is about; nothing is refused here."""
    selection = select(host, intent.layout)
    parts = [part for case in _cases(host, intent, selection.claims) for part in _parts(case)]
    dividing = {name for part in parts for name in _dividing(part.plan)}
    waiting = {
        claim.number: f"{claim.label}: {claim.rule.state}"
        for claim in selection.claims
        if dividing and _is_about_new_functions(host, claim, dividing)
    }
    return Comparison(
        tuple(part for part in parts if _divider(host, part) not in dividing),
        tuple(o for claim, o in selection.objections if claim.number not in waiting),
        tuple(waiting.values()),
    )


def _cases(host: HostSnapshot, intent: ApplyLayout, claims: Sequence[Claim]) -> Iterator[Case]:
    """Each rule with what it has to know of the others."""
    going = _going_to_guests(host, claims)
    taken = {device.address: claim.number for claim in claims for device in claim.devices}
    for claim in claims:
        others = frozenset(a for a, number in taken.items() if number != claim.number)
        yield Case(host, intent, claim, others, going)


def _is_about_new_functions(host: HostSnapshot, claim: Claim, dividing: set[str]) -> bool:
    """Whether a rule may be about virtual functions that are yet to be made."""
    select = claim.rule.select
    if not dividing.isdisjoint(map(str, select.physical_function)):
        return True
    return any(host.device_named(str(address)) is None for address in select.address)


def _dividing(plan: Plan) -> Iterator[str]:
    """The functions whose virtual functions a plan exchanges: of these, nothing is known yet."""
    for step in plan.steps:
        if isinstance(step, SetVfCount | RunSriovManage):
            yield str(step.device.address)


def _divider(host: HostSnapshot, part: Part) -> str | None:
    device = host.device_named(part.name)
    return None if device is None or not device.physical_function else str(device.physical_function)


def settled(host: HostSnapshot, intent: ApplyLayout) -> ApplyLayout:
    """The intent with what only the host before it can tell, so that it can be finished."""
    known = {before.address for before in intent.before}
    found = [
        FunctionBefore(
            device.address,
            device.sriov_drivers_autoprobe,
            _mixes(host, device),
            gpu_instances.places(host, device),
        )
        for claim in select(host, intent.layout).claims
        for device in claim.devices
        if device.sriov_totalvfs and device.address not in known
    ]
    return replace(intent, before=(*intent.before, *found))


def _mixes(host: HostSnapshot, device: PciDevice) -> bool | None:
    mode = host.gpu_mode(device)
    return None if mode is None else mode.heterogeneous


def _already(right: int, parts: int) -> str:
    if right == parts:
        return f"all of it is so already ({counted(parts, 'part')})"
    return f"{right} of {counted(parts, 'part')} {'is' if right == 1 else 'are'} so already"


def _going_to_guests(host: HostSnapshot, claims: Iterable[Claim]) -> frozenset[PciAddress]:
    """All functions that rules give to guests, with those that come along."""
    found: set[PciAddress] = set()
    for claim in claims:
        match claim.rule:
            case PassthroughRule() as rule:
                found.update(device.address for device in claim.devices)
                if not rule.only:
                    found.update(o.address for d in claim.devices for o in host.slot(d))
                if rule.with_group:
                    groups = {device.iommu_group for device in claim.devices}
                    found.update(o.address for n in groups for o in host.group_members(n))
            case SriovRule(functions="passthrough"):
                found.update(address for d in claim.devices for address in d.virtual_functions)
    return frozenset(found)


def _parts(case: Case) -> Iterator[Part]:
    match case.claim.rule:
        case PassthroughRule() as rule:
            for batch in moving_together(case.claim.devices):
                yield _to_guests(case, _bind(case, rule, batch))
        case HostRule():
            for batch in moving_together(case.claim.devices):
                yield _to_host(case, batch)
        case SriovRule() as rule:
            for device in case.claim.devices:
                yield from _with_functions(case, rule, device)
        case VgpuRule() as rule:
            if case.claim.devices or case.claim.parents:
                yield from layout_vgpus.parts(case, rule)
        case _ as never:
            assert_never(never)


# ---- guests and the host


def binds(host: HostSnapshot, intent: ApplyLayout) -> Iterator[Bind]:
    """What a layout gives to guests whole, as wishes of their own."""
    for claim in select(host, intent.layout).claims:
        if isinstance(claim.rule, PassthroughRule):
            for batch in moving_together(claim.devices):
                yield _bind(Case(host, intent, claim), claim.rule, batch)


def _bind(case: Case, rule: PassthroughRule, batch: Iterable[PciDevice]) -> Bind:
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


def _to_guests(case: Case, bind: Bind) -> Part:
    """Functions for guests; a GPU that is divided is made whole first."""
    host = case.host
    devices = [host.device(address) for address in bind.addresses]
    if not bind.only and any(map(case.is_shared, devices)):
        slots = {other.address: other for device in devices for other in host.slot(device)}
        own = tuple(a for a in slots if a not in case.others or a in bind.addresses)
        bind = replace(bind, addresses=own, only=True)

    def planned() -> Plan:
        plans: list[Plan] = []
        before = host
        for device in devices:
            if _is_divided(host, device):
                whole = SwitchGpu(
                    device.address,
                    "passthrough",
                    allow=bind.allow,
                    autoprobe_after=case.autoprobe(device.address),
                    only=case.is_shared(device),
                )
                part, before = switch.brought(before, whole, replace(bind, addresses=()))
                plans.append(part)
        return _together([*plans, passthrough.plan_bind(before, bind, case.going)])

    wanted = f"passthrough ({bind.driver or 'VFIO'}{_pins(bind)})"
    return attempt(str(devices[0].address), planned, _differences(host, devices, wanted))


def _pins(bind: Bind) -> str:
    parts = [f"owner {bind.owner.name}"] if bind.owner else []
    parts += [f"reset_method {bind.reset_method}"] if bind.reset_method else []
    parts += ["never in D3cold"] if bind.no_d3cold else []
    return "".join(f", {part}" for part in parts)


def _is_divided(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether it has virtual functions or vGPUs, or is kept by what made these."""
    if device.physical_function is not None or device.is_bridge or device.is_on_vfio:
        return False
    uses = host.host_uses or ()
    is_kept = any((u.address, u.kind) == (device.address, "persistence-mode") for u in uses)
    return bool(device.sriov_numvfs) or bool(host.vgpus_of(str(device.address))) or is_kept


def _to_host(case: Case, batch: Sequence[PciDevice]) -> Part:
    """Functions for the host; a GPU that is divided is made whole."""

    def planned() -> Plan:
        plans: list[Plan] = []
        before = case.host
        ours = {*batch, *case.claim.rest}
        for device in batch:
            is_whole = ours.issuperset(case.host.slot(device))
            if not _has_to_be_made_whole(case.host, device):
                back = Unbind((device.address,), only=not is_whole, allow=case.allow)
                plans.append(passthrough.plan_unbind(before, back))
            else:
                whole = SwitchGpu(
                    device.address,
                    "host",
                    allow=case.allow,
                    autoprobe_after=case.autoprobe(device.address),
                    only=not is_whole,
                )
                part, before = switch.brought(before, whole)
                plans.append(part)
        return _together(plans)

    return attempt(str(batch[0].address), planned, _differences(case.host, batch, "host"))


def _has_to_be_made_whole(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether it is divided; GPU instances of a GPU that the host has are the host's own."""
    if device.physical_function is not None or device.is_bridge:
        return False
    return bool(device.sriov_numvfs) or bool(host.vgpus_of(str(device.address)))


def _differences(
    host: HostSnapshot, devices: Iterable[PciDevice], wanted: str
) -> tuple[Difference, ...]:
    """What is to be said of functions, if anything of them differs."""
    return tuple(Difference(str(d.address), d.name, use_of(host, d), wanted) for d in devices)


# ---- SR-IOV


def _with_functions(case: Case, rule: SriovRule, device: PciDevice) -> Iterator[Part]:
    """A physical function with its number, and then what is to become of the virtual ones."""
    count = device.sriov_totalvfs or 1 if rule.count == "max" else rule.count
    wanted = counted(count, "virtual function")
    name = str(device.address)

    def numbered() -> Plan:
        after = case.autoprobe(device.address)
        instances = case.instances(device.address) if count else None
        if not device.is_on_vfio and device.sriov_numvfs == count:
            same = SetVirtualFunctions(
                device.address, count, autoprobe_after=after, instances_after=instances
            )
            return sriov.plan_set(case.host, same)
        guards.refuse_if_any(sriov.impossible(case.host, device, count), frozenset())
        goal = SwitchGpu(
            device.address,
            "vgpu",
            functions=count,
            allow=case.allow,
            autoprobe_after=after,
            instances_after=instances,
            only=case.is_shared(device),
            autoprobe=rule.functions == "host",
        )
        return switch.brought(case.host, goal)[0]

    functions = attempt(name, numbered, _differences(case.host, [device], wanted))
    if rule.functions == "any" or not count:
        yield functions
    elif functions.differences:
        goes_to = "guests" if rule.functions == "passthrough" else "the host's drivers"
        yield replace(functions, later=(f"{name}: its {wanted} to {goes_to}",))
    else:
        yield functions
        for batch in moving_together(map(case.host.device, device.virtual_functions)):
            yield _virtual(case, rule, str(device.address), batch)


def _virtual(case: Case, rule: SriovRule, name: str, batch: Sequence[PciDevice]) -> Part:
    """Virtual functions that move together, for guests or for the host."""
    addresses = tuple(function.address for function in batch)

    def planned() -> Plan:
        if rule.functions == "host":
            return passthrough.plan_unbind(case.host, Unbind(addresses, allow=case.allow))
        owner = case.owner(rule.owner)
        bind = Bind(addresses, driver=rule.driver, allow=case.allow, owner=owner)
        return passthrough.plan_bind(case.host, bind, case.going)

    wanted = "host" if rule.functions == "host" else f"passthrough ({rule.driver or 'VFIO'})"
    return attempt(name, planned, _differences(case.host, batch, wanted))


# ---- what a run that was cut off left


def _leftovers(
    host: HostSnapshot, intent: ApplyLayout, steps: Sequence[object]
) -> Iterator[ReplaceFile | SetAutoprobe]:
    """Marks and settings that nothing else in the plan puts right."""
    written = {step.path for step in steps if isinstance(step, ReplaceFile)}
    there = {vgpu.name: vgpu for vgpu in host.vgpus}
    marks = {mark.path: mark.text for mark in host.vgpu_marks}
    for name in intent.begun:
        vgpu, file = there.get(name), MARKS / name
        before, after = marks.get(file), None if vgpu is None else mark_of(vgpu)
        if file not in written and before != after:
            yield ReplaceFile(file if vgpu is None else mark_file(vgpu), before, after)
    settings = {step.device.address for step in steps if isinstance(step, SetAutoprobe)}
    for found in intent.before:
        device = host.device_named(str(found.address))
        if device is None or found.autoprobe is None or found.address in settings:
            continue
        now = device.sriov_drivers_autoprobe
        if now is not None and now is not found.autoprobe:
            yield SetAutoprobe(device.identity, before=now, after=found.autoprobe)


def _together(plans: Sequence[Plan]) -> Plan:
    """One plan of several."""
    return Plan(
        summary="",
        steps=tuple(step for plan in plans for step in plan.steps),
        locks=tuple(sorted({lock for plan in plans for lock in plan.locks})),
        notes=_distinct(note for plan in plans for note in plan.notes),
        settles=_distinct(name for plan in plans for name in plan.settles),
    )


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(texts))
