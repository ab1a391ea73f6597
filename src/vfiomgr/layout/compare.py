"""Compares a layout with a host: the differences, and the plan that resolves them.

A layout is planned by the planners of `bind`, `unbind`, `vgpu` and `sriov`, whose remedies name the
options of these commands. In a layout, the keys of its rules are named instead.

The devices of each rule are compared in parts that can be changed separately: the functions of one
slot or IOMMU group, a physical function with its virtual ones, the GPUs that share a rule's vGPUs.
A part in the desired state has no steps, even if it is in use. What concerns functions that do not
exist yet is planned once they do; `deferred` of the parts describes it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, assert_never

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, Remedy, refuse_if_any
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.registry import plans, resolves
from vfiomgr.layout import functions, groups, vgpus
from vfiomgr.layout.groups import in_parallel_groups
from vfiomgr.layout.model import HostRule, PassthroughRule, SriovRule, VgpuRule
from vfiomgr.layout.parts import Change, Difference, RuleContext, RuleMatch, moving_together, select
from vfiomgr.layout.requests import ApplyLayout, FunctionBefore, LayoutCheckpoint
from vfiomgr.passthrough.at_boot import ends_at_reboot
from vfiomgr.persistence.installed_layout import RECORD, layout_name
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.sriov.steps import SetAutoprobe
from vfiomgr.units import counted
from vfiomgr.value import Value
from vfiomgr.vgpu.model import MARKS, mark_file, mark_of
from vfiomgr.vgpu.plan import present_instances

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from vfiomgr.diagnostic import Option, OptionName
    from vfiomgr.layout.model import Rule
    from vfiomgr.passthrough.steps import Bind
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot


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
        notes=tuple(dict.fromkeys(note for part in parts for note in part.plan.notes)),
        alternatives=tuple(dict.fromkeys(one for part in parts for one in part.plan.alternatives)),
        already=(_already(right, len(parts)),) if right else (),
        resolves=tuple(dict.fromkeys(name for part in parts for name in part.plan.resolves)),
        deferred=(
            *(text for part in parts for text in part.deferred),
            *(() if request.only else compared.deferred),
        ),
        parallel_groups=(*numbers, *(max(numbers, default=0) + 1 for _ in leftovers)),
    )


def compare(
    host: HostSnapshot, request: ApplyLayout, checkpoint: LayoutCheckpoint | None = None
) -> Comparison:
    """Compare everything that a layout concerns; nothing is refused here."""
    selection = select(host, request.layout)
    claims = selection.claims
    held = groups.holders(host, claims)
    found = [
        in_terms_of(case.claim.rule, part)
        for case in _cases(host, request, claims, held, checkpoint)
        for part in _parts(case)
    ]
    clashes = groups.clashes(host, request, claims, held)
    parts = groups.judged(host, found, clashes)
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
        groups.bundles(host, parts),
    )


def _cases(
    host: HostSnapshot,
    request: ApplyLayout,
    claims: Sequence[RuleMatch],
    held: Mapping[PciAddress, RuleMatch],
    checkpoint: LayoutCheckpoint | None = None,
) -> Iterator[RuleContext]:
    """Each rule, with what it needs to know of the others."""
    going = groups.going(host, claims)
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
    for case in _cases(host, request, claims, groups.holders(host, claims)):
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
        if file not in written and before != after:
            yield ReplaceFile(file if vgpu is None else mark_file(vgpu), before, after)
    settings = {step.device.address for step in steps if isinstance(step, SetAutoprobe)}
    for found in checkpoint.functions:
        device = host.device_named(str(found.address))
        if device is None or found.autoprobe is None or found.address in settings:
            continue
        now = device.sriov_drivers_autoprobe
        if now is not None and now is not found.autoprobe:
            yield SetAutoprobe(device.identity, before=now, after=found.autoprobe)
