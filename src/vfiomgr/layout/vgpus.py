"""The GPUs of a rule and their vGPUs: which stay, which are removed, which are created."""

from __future__ import annotations

import itertools
import uuid as uuids
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from vfiomgr.definitions.start import together
from vfiomgr.diagnostic import Diagnostic, blocker, refuse_if_any
from vfiomgr.engine.plan import Plan
from vfiomgr.gpu import plan as gpu_plan
from vfiomgr.gpu import switch
from vfiomgr.gpu.requests import SetGpuMode, SwitchGpu
from vfiomgr.layout import adopt
from vfiomgr.layout.model import VgpuRequest, VgpuRule
from vfiomgr.layout.parts import Change, Difference, RuleContext, attempt, use_of
from vfiomgr.passthrough import guards
from vfiomgr.paths import MDEV_DEVICES, PCI_DEVICES
from vfiomgr.units import counted
from vfiomgr.value import Value
from vfiomgr.vgpu import plan as vgpu_plan
from vfiomgr.vgpu import projection
from vfiomgr.vgpu.capacity import Gpu, gpus
from vfiomgr.vgpu.instance_plan import vgpu_made_by
from vfiomgr.vgpu.model import PARAMETERS, Vgpu, VgpuParent, VgpuType
from vfiomgr.vgpu.placement import find_parents, serving
from vfiomgr.vgpu.steps import CreateVgpu, RemoveVgpu, SetVgpuAttribute

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

    Kept = Iterable[tuple[VgpuRequest, Vgpu]]


def found_on(host: HostSnapshot, one: Vgpu) -> str | None:
    """The parameters of a vGPU; None if its driver does not support any."""
    return dict(host.defined.attributes_of(one.name)).get(PARAMETERS)


def are_others(found: str, request: VgpuRequest) -> bool:
    """Whether parameters differ from the requested ones, ignoring order and white space."""
    return _pairs(found) != _pairs(_text(request))


def setting(name: str, before: str | None, request: VgpuRequest) -> SetVgpuAttribute:
    """The step that sets the requested parameters of a vGPU."""
    directory = (PCI_DEVICES if ":" in name else MDEV_DEVICES) / name
    return SetVgpuAttribute(name, directory, PARAMETERS, before, _text(request))


def plan_kept(case: RuleContext, kept: Kept) -> Plan:
    """Set the parameters of vGPUs that stay; a guest sees new ones when it starts.

    Raises:
        Refusal: a driver does not support any, or a guest uses the vGPU.
    """
    steps: list[SetVgpuAttribute] = []
    diagnostics: list[Diagnostic] = []
    for request, one in kept:
        if request.parameters is None:
            continue
        found = found_on(case.host, one)
        if found is None:
            diagnostics.append(
                blocker(
                    "vgpu-no-parameters",
                    one,
                    f"the driver of {one} does not support parameters: {PARAMETERS} not found",
                    "remove parameters, or load the vendor's vGPU driver",
                )
            )
        elif are_others(found, request):
            diagnostics += guards.assigned(case.host, one)
            steps.append(setting(one.name, found, request))
    refuse_if_any(diagnostics, case.allow)
    locks = [f"vgpu-{step.vgpu}" for step in steps]
    return Plan("", tuple(steps), locks=tuple(locks), resolves=tuple(s.vgpu for s in steps))


def parameter_differences(host: HostSnapshot, kept: Kept) -> Iterator[Difference]:
    """The parameters that differ for vGPUs that stay."""
    for request, one in kept:
        if request.parameters is None:
            continue
        found = found_on(host, one)
        if found is None or are_others(found, request):
            told = "no parameters" if found is None else found.strip() or "no parameters"
            yield Difference(one.name, "", told, _text(request) or "no parameters")


def _text(request: VgpuRequest) -> str:
    return ",".join(f"{key}={value}" for key, value in (request.parameters or {}).items())


def _pairs(text: str) -> frozenset[str]:
    return frozenset("".join(text.split()).split(",")) - {""}


_NAMES = uuids.UUID("5f0c2d8e-6a51-4c0b-9a57-2f6f3f1f8f4e")
"""The name space of vGPU names made by layouts."""


class Lacking(Value):
    """An unmet request, its candidate GPUs, and how many of its vGPUs exist."""

    request: VgpuRequest
    scope: tuple[Gpu, ...]
    there: int


class Shares(Struct):
    """The existing and the requested vGPUs."""

    kept: list[tuple[VgpuRequest, Vgpu]] = field(default_factory=list)
    missing: list[tuple[Lacking, tuple[str, ...]]] = field(default_factory=list)
    """Unmet requests, with the names of the vGPUs to create for them."""
    surplus: list[Vgpu] = field(default_factory=list)


def shared_out(case: RuleContext, rule: VgpuRule, known: Sequence[Gpu]) -> Shares:
    """Which vGPUs stay: named ones first, then those in use by guests, then vfiomgr's own."""
    shares = Shares()
    left = {gpu.name: _by_worth(case.host, gpu) for gpu in known}
    named = {uuid for request in rule.vgpus for uuid in request.uuids}
    for request in sorted(rule.vgpus, key=_by_choice):
        for scope in [tuple(known)] if request.count else [(gpu,) for gpu in known]:
            count = request.count or request.per_gpu or 0
            mine = frozenset(request.uuids) or None
            kinds = {gpu.name: serving(gpu, creation(request)) for gpu in scope}
            kept = [
                (gpu, one)
                for gpu in scope
                for one in left[gpu.name]
                if gpu.type_of(one) in kinds[gpu.name]
                and (one.name not in named if mine is None else one.name in mine)
            ]
            # Those with the requested parameters first.
            found = {one: found_on(case.host, one) or "" for _, one in kept}
            kept = sorted(kept, key=lambda pair: are_others(found[pair[1]], request))[:count]
            for gpu, one in kept:
                left[gpu.name].remove(one)
                shares.kept.append((request, one))
            if len(kept) < count:
                lacking = Lacking(request, scope, len(kept))
                shares.missing.append((lacking, _names(case, lacking, count - len(kept), shares)))
    shares.surplus = [one for gpu in known for one in left[gpu.name]]
    return shares


def creation(request: VgpuRequest, names: tuple[str, ...] = ()) -> CreateVgpu:
    """The creation request for an unmet request."""
    return CreateVgpu(
        names,
        type=request.type,
        framebuffer=request.framebuffer,
        series=request.series,
        heads=request.heads,
    )


def _by_choice(request: VgpuRequest) -> tuple[bool, bool, bool, bool, int]:
    """Requests that only few vGPUs can meet come first."""
    return (
        not request.uuids,
        request.parameters is None,
        request.per_gpu is None,
        request.type is None,
        -(request.framebuffer or 0),
    )


def _by_worth(host: HostSnapshot, gpu: Gpu) -> list[Vgpu]:
    def worth(one: Vgpu) -> tuple[bool, bool, str]:
        return not host.holders(one), not host.vgpus.is_own(one), one.name

    return sorted(gpu.instances, key=worth)


def _names(case: RuleContext, lacking: Lacking, count: int, shares: Shares) -> tuple[str, ...]:
    """The names for new vGPUs: those of the request, or the first free generated ones."""
    request = lacking.request
    taken = {one.name for one in case.host.vgpus.active}
    taken.update(name for _, names in shares.missing for name in names)
    place = lacking.scope[0].name if request.per_gpu else ""
    row = f"{case.request.seed} {case.request.name} {place} {request}"
    endless = (str(uuids.uuid5(_NAMES, f"{row} {number}")) for number in itertools.count())
    names = iter(request.uuids) if request.uuids else endless
    return tuple(itertools.islice((name for name in names if name not in taken), count))


_ENDLESS = 1 << 20
_FEWER = "request fewer or smaller ones; show what fits: vfiomgr vgpu list --types"


def impossible(
    case: RuleContext, rule: VgpuRule, known: Sequence[Gpu], shares: Shares
) -> Iterator[Diagnostic]:
    """All reasons against a rule's vGPUs, independent of the existing ones."""
    yield from _foreign(case, shares)
    for lacking, _ in shares.missing:
        yield from _unmeetable(case, lacking)
    yield from _taken_names(case.host, rule, known, shares)
    for gpu in known:
        yield from _too_many(rule, gpu)


def _unmeetable(case: RuleContext, lacking: Lacking) -> Iterator[Diagnostic]:
    """A request that exceeds its GPUs, or that none of them supports."""
    request = lacking.request
    kinds = {gpu.name: serving(gpu, creation(request)) for gpu in lacking.scope}
    if lacking.scope and all(gpu.types for gpu in lacking.scope) and not any(kinds.values()):
        names = ", ".join(gpu.name for gpu in lacking.scope)
        text = f"none of {names} supports {request}"
        if len(kinds) == 1:
            text = f"{names} does not support {request}"
        remedy = "show the types of each: vfiomgr vgpu list --types"
        yield blocker("vgpu-type-unavailable", names, text, remedy)
    most = [max(map(partial(_most, gpu), kinds[gpu.name]), default=0) for gpu in lacking.scope]
    count = request.count or request.per_gpu or 0
    if 0 < sum(most) < count:
        yield blocker(
            "vgpu-no-capacity",
            case.claim.label,
            f"{case.claim.label} requests {count} x {request}, but its GPUs have capacity for "
            f"{sum(most)}",
            _FEWER,
        )


def _most(gpu: Gpu, kind: VgpuType) -> int:
    """How many of a type fit on an otherwise empty GPU; a very large number if unknown."""
    functions = sum(parent.is_virtual_function for parent in gpu.parents)
    limits = [functions] if functions else []
    limits += [kind.max_instances] if kind.max_instances is not None else []
    if gpu.framebuffer is not None and kind.framebuffer and not (gpu.mode and gpu.mode.mig):
        limits.append(gpu.framebuffer // kind.framebuffer)
    return min(limits, default=_ENDLESS)


def _foreign(case: RuleContext, shares: Shares) -> Iterator[Diagnostic]:
    foreign = [one for one in shares.surplus if not case.host.vgpus.is_own(one)]
    if foreign:
        label = case.claim.label
        command = f"vfiomgr vgpu remove {' '.join(one.name for one in foreign)}"
        named = ", ".join(f"{one.name} ({one.type_name or one.type})" for one in foreign)
        text = f"{label} does not include these vGPUs, and vfiomgr did not create them"
        remedy = f"add them to the layout, or remove them if they are not needed: {command}"
        yield blocker("unmanaged-vgpus", label, f"{text}: {named}", remedy)


def _taken_names(
    host: HostSnapshot, rule: VgpuRule, known: Sequence[Gpu], shares: Shares
) -> Iterator[Diagnostic]:
    kept = {one.name for _, one in shares.kept}
    going = {one.name for one in shares.surplus}
    for name in (uuid for request in rule.vgpus for uuid in request.uuids):
        there = host.vgpus.named(name)
        if there is not None and name not in kept | going:
            yield blocker(
                "vgpu-elsewhere",
                there,
                f"{there} is on {there.parent}, but the layout places it on "
                + " or ".join(gpu.name for gpu in known),
                f"choose another UUID, or first run vfiomgr vgpu remove {name}",
            )


def _too_many(rule: VgpuRule, gpu: Gpu) -> Iterator[Diagnostic]:
    """The vGPUs per GPU that exceed what its types allow."""
    kinds: list[tuple[int, VgpuType]] = []
    for request in rule.vgpus:
        if request.per_gpu is not None:
            fitting = serving(gpu, creation(request))
            kinds += [(request.per_gpu, kind) for kind in fitting[:1]]
    reasons: list[tuple[str, str]] = []
    functions = sum(parent.is_virtual_function for parent in gpu.parents)
    total = sum(count for count, _ in kinds)
    if functions and total > functions:
        text = f"{counted(functions, 'virtual function')}, too few for {counted(total, 'vGPU')}"
        reasons.append((text, "request fewer vGPUs, or more functions in the rule"))
    memory = sum(count * (kind.framebuffer or 0) for count, kind in kinds)
    if gpu.framebuffer is not None and memory > gpu.framebuffer:
        reasons.append((f"{gpu.framebuffer} MiB, too few for vGPUs of {memory} MiB", _FEWER))
    for count, kind in kinds:
        if kind.max_instances is not None and count > kind.max_instances:
            text = f"capacity for at most {kind.max_instances} {kind}, not {count}"
            reasons.append((text, _FEWER))
    for text, remedy in reasons:
        yield blocker("vgpu-no-capacity", gpu, f"{gpu} has {text}", remedy)


def parts(case: RuleContext, rule: VgpuRule) -> Iterator[Change]:
    """Each GPU prepared, and then the vGPUs of all together."""
    numbers = (device.iommu_group for device in case.claim.devices)
    groups = frozenset(number for number in numbers if number is not None)
    names = (*(str(device.address) for device in case.claim.devices), *case.claim.parents)
    found = [_made_ready(case, rule, device, names[0]) for device in case.claim.devices]
    if any(part.differences for part in found):
        requests = " and ".join(map(_told, rule.vgpus))
        goal = requests or (_readiness(rule) if rule.mig is not None else "")
        deferred = (f"{', '.join(names)}: {goal}",) if goal else ()
        found[0] = replace(found[0], deferred=deferred)
    else:
        found = [_carrying(case, rule, names)]
    yield from (replace(part, groups=groups) for part in found)


def _told(request: VgpuRequest) -> str:
    """`4 x A40-4Q`, with `on each` for per_gpu."""
    return f"{request.count or request.per_gpu} x {request}{' on each' if request.per_gpu else ''}"


# ---- ready for vGPUs


def _made_ready(case: RuleContext, rule: VgpuRule, device: PciDevice, name: str) -> Change:
    address = device.address

    def planned() -> Plan:
        mode = case.host.vgpus.mode_of(device)
        is_other = mode is None or mode.mig is not rule.mig
        if rule.mig is not None and is_other and not device.is_on_vfio:
            return gpu_plan.plan_mode(case.host, SetGpuMode(address, mig=rule.mig))
        functions = rule.functions
        if functions is None and device.sriov_numvfs and not device.is_on_vfio:
            functions = device.sriov_numvfs
        goal = SwitchGpu(
            address,
            "vgpu",
            functions=functions,
            heterogeneous=rule.heterogeneous,
            allow=case.allow,
        )
        found = case.found(address, with_mode=True, with_instances=True)
        return switch.brought(case.host, goal, found)[0]

    difference = Difference(str(address), device.name, use_of(case.host, device), _readiness(rule))
    return attempt(name, planned, (difference,))


def _readiness(rule: VgpuRule) -> str:
    parts = ["vGPUs"]
    parts += [counted(rule.functions, "virtual function")] if rule.functions else []
    if rule.heterogeneous is not None:
        parts.append("heterogeneous" if rule.heterogeneous else "of one size")
    if rule.mig is not None:
        parts.append("in GPU instances" if rule.mig else "MIG off")
    return ", ".join(parts)


# ---- which vGPUs


def _carrying(case: RuleContext, rule: VgpuRule, names: tuple[str, ...]) -> Change:
    others = frozenset(map(str, case.others))
    free = (p for p in case.host.vgpus.parents if p.name not in others)
    host = replace(case.host, vgpus=replace(case.host.vgpus, parents=tuple(free)))
    case = replace(case, host=host)
    wanted = frozenset(names)
    known = tuple(gpu for gpu in gpus(host) if gpu.name in wanted)
    absent = wanted.difference(gpu.name for gpu in known) if rule.vgpus else ()
    shares = shared_out(case, rule, known)
    waits = bool(shares.surplus and shares.missing)
    adopted = [one for _, one in shares.kept] if case.request.adopt else []

    def planned() -> Plan:
        for name in absent:
            find_parents(host, name)  # raises with the reason
        refuse_if_any(impossible(case, rule, known, shares))
        if waits:
            return _without_surplus(case, shares)
        parts = (
            _without_surplus(case, shares),
            _with_missing(host, rule, shares),
            plan_kept(case, shares.kept),
            adopt.adoption(host, adopted, case.checkpoint.begun),
        )
        return together(host, "", parts)

    found = (*_differences(shares, known, names), *adopt.differences(host, known, adopted))
    part = attempt(names[0], planned, found)
    requests = " and ".join(map(_told, rule.vgpus))
    return replace(
        part,
        differences=part.differences or tuple(parameter_differences(host, shares.kept)),
        deferred=(f"{', '.join(names)}: {requests}",) if waits and part.plan.steps else (),
    )


# ---- plans


def _without_surplus(case: RuleContext, shares: Shares) -> Plan:
    if not shares.surplus:
        return Plan("", ())
    names = tuple(one.name for one in shares.surplus)
    return vgpu_plan.plan_remove(case.host, RemoveVgpu(names, allow=case.allow & {"in-use"}))


def _with_missing(host: HostSnapshot, rule: VgpuRule, shares: Shares) -> Plan:
    """Create the missing ones; each batch is placed after the previous ones."""
    plans: list[Plan] = []
    made: list[Vgpu] = []
    by_gpu = _by_gpu(host)
    for lacking, names in shares.missing:
        alone = _narrowed(host, [by_gpu[gpu.name] for gpu in lacking.scope])
        places = {parent.name for parent in alone.vgpus.parents}
        narrow = projection.with_vgpus(alone, [one for one in made if one.parent in places])
        request = replace(creation(lacking.request, names), strategy=rule.strategy)
        plan = vgpu_plan.plan_create(narrow, request)
        new = list(filter(None, map(vgpu_made_by, plan.steps)))
        parameters = [
            setting(one.name, None, lacking.request) for one in new if lacking.request.parameters
        ]
        plans.append(replace(plan, steps=(*plan.steps, *parameters)))
        made += new
    return together(host, "", plans)


class _Whole(Struct):
    """A GPU with all its functions and vGPUs."""

    devices: list[PciDevice] = field(default_factory=list)
    parents: list[VgpuParent] = field(default_factory=list)


def _by_gpu(host: HostSnapshot) -> dict[str, _Whole]:
    """The GPUs of a host, each with its virtual functions."""
    found: dict[str, _Whole] = {}
    for parent in host.vgpus.parents:
        found.setdefault(parent.gpu, _Whole()).parents.append(parent)
    for device in host.devices:
        whole = found.get(str(device.physical_function or device.address))
        if whole is not None:
            whole.devices.append(device)
    return found


def _narrowed(host: HostSnapshot, gpus_alone: Sequence[_Whole]) -> HostSnapshot:
    """The host reduced to these GPUs."""
    parents = tuple(parent for whole in gpus_alone for parent in whole.parents)
    return replace(
        host,
        devices=tuple(device for whole in gpus_alone for device in whole.devices),
        vgpus=replace(host.vgpus, parents=parents),
    )


# ---- what differs


def _differences(
    shares: Shares, known: Iterable[Gpu], names_of_rule: Iterable[str]
) -> Iterator[Difference]:
    kept = {one.name for _, one in shares.kept}
    for lacking, _ in shares.missing:
        request = lacking.request
        where = ", ".join(gpu.name for gpu in lacking.scope) or ", ".join(names_of_rule)
        device = lacking.scope[0].device if len(lacking.scope) == 1 else None
        named = [uuid for uuid in request.uuids if uuid not in kept] if shares.surplus else []
        wanted = f"{request.count or request.per_gpu} x {request}"
        wanted += f" ({', '.join(named)})" if named else ""
        name = device.name if device else ""
        yield Difference(where, name, f"{lacking.there} x {request}", wanted)
    for gpu in known:
        model = gpu.device.name if gpu.device else ""
        for one in shares.surplus:
            if one in gpu.instances:
                yield Difference(gpu.name, model, f"{one}, {gpu.type_of(one) or one.type}", "none")
