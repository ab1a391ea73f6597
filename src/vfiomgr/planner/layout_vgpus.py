"""The GPUs of a rule and the vGPUs that they are to carry: which stay, which go, which are made."""

from __future__ import annotations

import itertools
import uuid as uuids
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from vfiomgr.model.attribute_step import SetVgpuAttribute
from vfiomgr.model.definition import PARAMETERS
from vfiomgr.model.intent import CreateVgpu, RemoveVgpu, SetGpuMode, SwitchGpu
from vfiomgr.model.layout import VgpuWish
from vfiomgr.model.path import MDEV_DEVICES, PCI_DEVICES
from vfiomgr.model.pci import PciDevice
from vfiomgr.model.plan import Plan
from vfiomgr.model.vgpu import Vgpu, VgpuParent, VgpuType
from vfiomgr.model.vgpu_step import CreateMdev, SetVgpuType
from vfiomgr.planner import future, gpu_mode, guards, switch, vgpu
from vfiomgr.planner.guards import Objection
from vfiomgr.planner.layout_part import Case, Difference, Part, attempt, counted, use_of
from vfiomgr.planner.vgpu_choice import find_parents, serves
from vfiomgr.planner.vgpu_room import Gpu, gpus
from vfiomgr.planner.vgpu_start import together

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.model.layout import VgpuRule
    from vfiomgr.model.snapshot import HostSnapshot

_NAMES = uuids.UUID("5f0c2d8e-6a51-4c0b-9a57-2f6f3f1f8f4e")
"""The name space of the names that layouts give."""
_ENDLESS = 1 << 20


def parts(case: Case, rule: VgpuRule) -> Iterator[Part]:
    """Each GPU made ready, and then, of all together, their vGPUs."""
    names = (*(str(device.address) for device in case.claim.devices), *case.claim.parents)
    ready = [_made_ready(case, rule, device, names[0]) for device in case.claim.devices]
    if not any(part.differences for part in ready):
        yield _carrying(case, rule, names)
        return
    wishes = " and ".join(map(_told, rule.vgpus))
    goal = wishes or (_readiness(rule) if rule.mig is not None else "")
    later = (f"{', '.join(names)}: {goal}",) if goal else ()
    yield replace(ready[0], later=later)
    yield from ready[1:]


def _told(wish: VgpuWish) -> str:
    """`4 x A40-4Q`, with `on each` where that is meant."""
    return f"{wish.count or wish.per_gpu} x {wish}{' on each' if wish.per_gpu else ''}"


# ---- ready for vGPUs


def _made_ready(case: Case, rule: VgpuRule, device: PciDevice, name: str) -> Part:
    address = device.address

    def planned() -> Plan:
        mode = case.host.gpu_mode(device)
        is_other = mode is None or mode.mig is not rule.mig
        if rule.mig is not None and is_other and not device.is_on_vfio:
            return gpu_mode.plan_mode(case.host, SetGpuMode(address, mig=rule.mig))
        functions = rule.functions
        if functions is None and device.sriov_numvfs and not device.is_on_vfio:
            functions = device.sriov_numvfs
        mixed = rule.heterogeneous
        goal = SwitchGpu(
            address,
            "vgpu",
            functions=functions,
            heterogeneous=case.heterogeneous(address) if mixed is None else mixed,
            allow=case.allow,
            autoprobe_after=case.autoprobe(address),
            instances_after=case.instances(address),
        )
        return switch.brought(case.host, goal)[0]

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


@dataclass(frozen=True)
class _Lacking:
    """A wish that is not met, the GPUs that may serve it, and how many of it are there."""

    wish: VgpuWish
    scope: tuple[Gpu, ...]
    there: int


@dataclass
class _Shares:
    """The vGPUs that are there, shared out among the wishes of a rule."""

    kept: list[tuple[VgpuWish, Vgpu]] = field(default_factory=list)
    missing: list[tuple[_Lacking, tuple[str, ...]]] = field(default_factory=list)
    """What is not met, with the names of the vGPUs that are to be made for it."""
    surplus: list[Vgpu] = field(default_factory=list)


def _carrying(case: Case, rule: VgpuRule, names: tuple[str, ...]) -> Part:
    free = (p for p in case.host.vgpu_parents if p.name not in map(str, case.others))
    host = replace(case.host, vgpu_parents=tuple(free))
    case = replace(case, host=host)
    wanted = frozenset(names)
    known = tuple(gpu for gpu in gpus(host) if gpu.name in wanted)
    absent = wanted.difference(gpu.name for gpu in known) if rule.vgpus else ()
    shares = _shared_out(case, rule, known)
    waits = bool(shares.surplus and shares.missing)

    def planned() -> Plan:
        for name in absent:
            find_parents(host, name)  # which tells why it makes none
        guards.refuse_if_any(_impossible(case, rule, known, shares), frozenset())
        if waits:
            return _without_surplus(case, shares)
        parts = (
            _without_surplus(case, shares),
            _with_missing(host, rule, shares),
            _with_parameters(case, shares),
        )
        return together(host, "", parts)

    part = attempt(names[0], planned, tuple(_differences(shares, known, names)))
    wishes = " and ".join(map(_told, rule.vgpus))
    return replace(
        part,
        differences=part.differences or tuple(_parameter_differences(host, shares)),
        later=(f"{', '.join(names)}: {wishes}",) if waits and part.plan.steps else (),
    )


def _shared_out(case: Case, rule: VgpuRule, known: Sequence[Gpu]) -> _Shares:
    """Who stays: those that are named first, then those that guests have, then vfiomgr's own."""
    shares = _Shares()
    left = {gpu.name: _by_worth(case.host, gpu) for gpu in known}
    named = {uuid for wish in rule.vgpus for uuid in wish.uuids}
    for wish in sorted(rule.vgpus, key=_by_choice):
        for scope in [tuple(known)] if wish.count else [(gpu,) for gpu in known]:
            count = wish.count or wish.per_gpu or 0
            mine = frozenset(wish.uuids) or None
            kept = [
                (gpu, one)
                for gpu in scope
                for one in left[gpu.name]
                if _is_wanted(gpu, one, wish)
                and (one.name not in named if mine is None else one.name in mine)
            ]
            kept = sorted(kept, key=lambda pair: _has_other_parameters(case.host, pair[1], wish))
            kept = kept[:count]
            for gpu, one in kept:
                left[gpu.name].remove(one)
                shares.kept.append((wish, one))
            if len(kept) < count:
                lacking = _Lacking(wish, scope, len(kept))
                shares.missing.append((lacking, _names(case, lacking, count - len(kept), shares)))
    shares.surplus = [one for gpu in known for one in left[gpu.name]]
    return shares


def _by_choice(wish: VgpuWish) -> tuple[bool, bool, bool, bool, int]:
    """Those that few vGPUs can meet come first."""
    return (
        not wish.uuids,
        wish.parameters is None,
        wish.per_gpu is None,
        wish.type is None,
        -(wish.framebuffer or 0),
    )


def _has_other_parameters(host: HostSnapshot, one: Vgpu, wish: VgpuWish) -> bool:
    found = dict(host.defined.attributes_of(one.name)).get(PARAMETERS, "")
    return _pairs(found) != _pairs(_text(wish))


def _by_worth(host: HostSnapshot, gpu: Gpu) -> list[Vgpu]:
    def worth(one: Vgpu) -> tuple[bool, bool, str]:
        return not host.holders(one), not host.is_own(one), one.name

    return sorted(gpu.instances, key=worth)


def _is_wanted(gpu: Gpu, one: Vgpu, wish: VgpuWish) -> bool:
    kind = gpu.type_of(one)
    return kind is not None and serves(kind, _creation(wish, ()))


def _names(case: Case, lacking: _Lacking, count: int, shares: _Shares) -> tuple[str, ...]:
    """Names for new ones: the wish's own, or the first that are free of an endless row of them."""
    wish = lacking.wish
    taken = {one.name for one in case.host.vgpus}
    taken.update(name for _, names in shares.missing for name in names)
    place = lacking.scope[0].name if wish.per_gpu else ""
    row = f"{case.intent.seed} {case.intent.name} {place} {wish}"
    endless = (str(uuids.uuid5(_NAMES, f"{row} {number}")) for number in itertools.count())
    names = iter(wish.uuids) if wish.uuids else endless
    return tuple(itertools.islice((name for name in names if name not in taken), count))


def _creation(wish: VgpuWish, names: tuple[str, ...]) -> CreateVgpu:
    return CreateVgpu(
        names,
        type=wish.type,
        framebuffer=wish.framebuffer,
        series=wish.series,
        heads=wish.heads,
    )


# ---- what cannot be


def _impossible(
    case: Case, rule: VgpuRule, known: Sequence[Gpu], shares: _Shares
) -> Iterator[Objection]:
    """What no order of removing and creating would bring about."""
    yield from _foreign(case, shares)
    for lacking, _ in shares.missing:
        yield from _unmeetable(case, lacking)
    yield from _taken_names(case.host, rule, known, shares)
    for gpu in known:
        yield from _too_many(rule, gpu)


def _unmeetable(case: Case, lacking: _Lacking) -> Iterator[Objection]:
    """A wish for more than its GPUs could ever carry, or for what none of them makes."""
    wish = lacking.wish
    kinds = {
        gpu.name: [k for k in gpu.types if serves(k, _creation(wish, ()))] for gpu in lacking.scope
    }
    if lacking.scope and all(gpu.types for gpu in lacking.scope) and not any(kinds.values()):
        names = ", ".join(gpu.name for gpu in lacking.scope)
        yield Objection(
            f"{names} makes no {wish}" if len(kinds) == 1 else f"none of {names} makes {wish}",
            "vfiomgr vgpu types shows what each makes",
        )
    most = [max(map(partial(_most, gpu), kinds[gpu.name]), default=0) for gpu in lacking.scope]
    count = wish.count or wish.per_gpu or 0
    if 0 < sum(most) < count:
        yield Objection(
            f"{case.claim.label} wants {count} x {wish}, and its GPUs carry {sum(most)}",
            "ask for fewer or smaller ones; vfiomgr vgpu types shows what fits",
        )


def _most(gpu: Gpu, kind: VgpuType) -> int:
    """How many of a type a GPU carries with nothing else; very many where nothing says."""
    functions = sum(parent.is_virtual_function for parent in gpu.parents)
    limits = [functions] if functions else []
    limits += [kind.max_instances] if kind.max_instances is not None else []
    if gpu.framebuffer is not None and kind.framebuffer and not (gpu.mode and gpu.mode.mig):
        limits.append(gpu.framebuffer // kind.framebuffer)
    return min(limits, default=_ENDLESS)


def _foreign(case: Case, shares: _Shares) -> Iterator[Objection]:
    names = [one.name for one in shares.surplus if not case.host.is_own(one)]
    if names:
        yield Objection(
            f"{case.claim.label} wants no such vGPUs, and vfiomgr did not make them: "
            + ", ".join(names),
            "put them into the layout, or remove them if nobody needs them: vfiomgr vgpu remove "
            + " ".join(names),
        )


def _taken_names(
    host: HostSnapshot, rule: VgpuRule, known: Sequence[Gpu], shares: _Shares
) -> Iterator[Objection]:
    kept = {one.name for _, one in shares.kept}
    going = {one.name for one in shares.surplus}
    for name in (uuid for wish in rule.vgpus for uuid in wish.uuids):
        there = host.vgpu(name)
        if there is not None and name not in kept | going:
            yield Objection(
                f"{there} is on {there.parent}, and the layout wants it on "
                + " or ".join(gpu.name for gpu in known),
                f"choose another UUID, or vfiomgr vgpu remove {name} first",
            )


def _too_many(rule: VgpuRule, gpu: Gpu) -> Iterator[Objection]:
    """What each GPU is to carry by itself, against what its types say."""
    wishes = [wish for wish in rule.vgpus if wish.per_gpu is not None]
    kinds = [
        (wish.per_gpu or 0, kind)
        for wish in wishes
        if (kind := next((k for k in gpu.types if serves(k, _creation(wish, ()))), None))
    ]
    functions = [parent for parent in gpu.parents if parent.is_virtual_function]
    total = sum(count for count, _ in kinds)
    if functions and total > len(functions):
        yield Objection(
            f"{gpu} has {len(functions)} virtual functions, too few for {total} vGPUs",
            "ask for fewer, or for more functions in the rule",
        )
    memory = sum(count * (kind.framebuffer or 0) for count, kind in kinds)
    if gpu.framebuffer is not None and memory > gpu.framebuffer:
        yield Objection(
            f"{gpu} has {gpu.framebuffer} MiB, too few for vGPUs of {memory} MiB",
            "ask for fewer or smaller ones; vfiomgr vgpu types shows what fits",
        )
    for count, kind in kinds:
        if kind.max_instances is not None and count > kind.max_instances:
            yield Objection(
                f"{gpu} carries at most {kind.max_instances} {kind}, not {count}",
                "ask for fewer or smaller ones; vfiomgr vgpu types shows what fits",
            )


# ---- plans


def _without_surplus(case: Case, shares: _Shares) -> Plan:
    if not shares.surplus:
        return Plan("", ())
    names = tuple(one.name for one in shares.surplus)
    return vgpu.plan_remove(case.host, RemoveVgpu(names, allow=case.allow & {"in-use"}))


def _with_missing(host: HostSnapshot, rule: VgpuRule, shares: _Shares) -> Plan:
    """The new ones, each batch on its GPUs as the batches before leave them."""
    plans: list[Plan] = []
    made: list[Vgpu] = []
    by_gpu = _by_gpu(host)
    for lacking, names in shares.missing:
        alone = _narrowed(host, [by_gpu[gpu.name] for gpu in lacking.scope])
        places = {parent.name for parent in alone.vgpu_parents}
        narrow = future.with_vgpus(alone, [one for one in made if one.parent in places])
        intent = replace(_creation(lacking.wish, names), strategy=rule.strategy)
        plan = vgpu.plan_create(narrow, intent)
        new = [one for step in plan.steps if (one := _made_by(narrow, step)) is not None]
        parameters = [
            _parameter(v.name, None, lacking.wish) for v in new if lacking.wish.parameters
        ]
        plans.append(replace(plan, steps=(*plan.steps, *parameters)))
        made += new
    return together(host, "", plans)


@dataclass
class _Whole:
    """A GPU with all that belongs to it."""

    devices: list[PciDevice] = field(default_factory=list)
    parents: list[VgpuParent] = field(default_factory=list)


def _by_gpu(host: HostSnapshot) -> dict[str, _Whole]:
    """The GPUs of a host, each with its virtual functions."""
    found: dict[str, _Whole] = {}
    for parent in host.vgpu_parents:
        found.setdefault(parent.gpu, _Whole()).parents.append(parent)
    for device in host.devices:
        whole = found.get(str(device.physical_function or device.address))
        if whole is not None:
            whole.devices.append(device)
    return found


def _narrowed(host: HostSnapshot, gpus_alone: Sequence[_Whole]) -> HostSnapshot:
    """The host as if it had these GPUs alone."""
    return replace(
        host,
        devices=tuple(device for whole in gpus_alone for device in whole.devices),
        vgpu_parents=tuple(parent for whole in gpus_alone for parent in whole.parents),
    )


def _made_by(host: HostSnapshot, step: object) -> Vgpu | None:
    make = partial(
        Vgpu,
        type_name=None,
        driver=None,
        iommu_group=None,
        vfio_device=None,
        numa_node=None,
    )
    match step:
        case CreateMdev():
            return make(uuid=step.uuid, family="mdev", parent=step.parent, type=step.type_id)
        case SetVgpuType() if step.after:
            parent = str(step.device.address)
            family = next(p.family for p in host.vgpu_parents if p.name == parent)
            return make(uuid=None, family=family, parent=parent, type=str(step.after))
        case _:
            return None


def _with_parameters(case: Case, shares: _Shares) -> Plan:
    """Parameters of those that stay; a guest sees new ones when it starts."""
    steps: list[SetVgpuAttribute] = []
    objections: list[Objection] = []
    for wish, one in shares.kept:
        if wish.parameters is None:
            continue
        found = dict(case.host.defined.attributes_of(one.name)).get(PARAMETERS)
        if found is None:
            objections.append(
                Objection(
                    f"the driver of {one} takes no parameters: it has no {PARAMETERS}",
                    "leave parameters out, or load the vendor's vGPU driver",
                )
            )
        elif _pairs(found) != _pairs(_text(wish)):
            objections += guards.held_by_guest(case.host, one)
            steps.append(_parameter(one.name, found, wish))
    guards.refuse_if_any(objections, case.allow)
    locks = [f"vgpu-{step.vgpu}" for step in steps]
    return Plan("", tuple(steps), locks=tuple(locks), settles=tuple(s.vgpu for s in steps))


def _parameter(name: str, before: str | None, wish: VgpuWish) -> SetVgpuAttribute:
    directory = (PCI_DEVICES if ":" in name else MDEV_DEVICES) / name
    return SetVgpuAttribute(name, directory, PARAMETERS, before, _text(wish))


def _text(wish: VgpuWish) -> str:
    return ",".join(f"{key}={value}" for key, value in (wish.parameters or {}).items())


def _pairs(text: str) -> frozenset[str]:
    """Parameters whatever their order and white space."""
    return frozenset("".join(text.split()).split(",")) - {""}


# ---- what differs


def _differences(
    shares: _Shares, known: Iterable[Gpu], names_of_rule: Iterable[str]
) -> Iterator[Difference]:
    for lacking, names in shares.missing:
        where = ", ".join(gpu.name for gpu in lacking.scope) or ", ".join(names_of_rule)
        device = lacking.scope[0].device if len(lacking.scope) == 1 else None
        found, wanted = lacking.there, lacking.there + len(names)
        told = f"{found} x {lacking.wish}", f"{wanted} x {lacking.wish}"
        yield Difference(where, device.name if device else "", *told)
    for gpu in known:
        model = gpu.device.name if gpu.device else ""
        for one in shares.surplus:
            if one in gpu.instances:
                yield Difference(gpu.name, model, f"{one}, {gpu.type_of(one) or one.type}", "none")


def _parameter_differences(host: HostSnapshot, shares: _Shares) -> Iterator[Difference]:
    for wish, one in shares.kept:
        found = dict(host.defined.attributes_of(one.name)).get(PARAMETERS)
        if wish.parameters is not None and (found is None or _pairs(found) != _pairs(_text(wish))):
            told = "no parameters" if found is None else found.strip() or "no parameters"
            yield Difference(one.name, "", told, _text(wish) or "no parameters")
