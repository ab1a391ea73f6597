"""The GPUs of a rule and their vGPUs: which stay, which are removed, which are created."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from vfiomgr.definitions.start import together
from vfiomgr.diagnostic import refuse_if_any
from vfiomgr.engine.plan import Plan
from vfiomgr.gpu import plan as gpu_plan
from vfiomgr.gpu import switch
from vfiomgr.gpu.requests import SetGpuMode, SwitchGpu
from vfiomgr.layout import vgpu_shares
from vfiomgr.layout.parts import Change, Difference, RuleContext, attempt, use_of
from vfiomgr.layout.vgpu_shares import Shares, creation, impossible, shared_out
from vfiomgr.units import counted
from vfiomgr.vgpu import plan as vgpu_plan
from vfiomgr.vgpu import projection
from vfiomgr.vgpu.capacity import Gpu, gpus
from vfiomgr.vgpu.model import Vgpu, VgpuParent
from vfiomgr.vgpu.placement import find_parents
from vfiomgr.vgpu.steps import CreateMdev, RemoveVgpu, SetVgpuType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.layout.model import VgpuRequest, VgpuRule
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


def parts(case: RuleContext, rule: VgpuRule) -> Iterator[Change]:
    """Each GPU prepared, and then the vGPUs of all together."""
    numbers = (device.iommu_group for device in case.claim.devices)
    groups = frozenset(number for number in numbers if number is not None)
    yield from (replace(part, groups=groups) for part in _parts(case, rule))


def _parts(case: RuleContext, rule: VgpuRule) -> Iterator[Change]:
    names = (*(str(device.address) for device in case.claim.devices), *case.claim.parents)
    ready = [_made_ready(case, rule, device, names[0]) for device in case.claim.devices]
    if not any(part.differences for part in ready):
        yield _carrying(case, rule, names)
        return
    requests = " and ".join(map(_told, rule.vgpus))
    goal = requests or (_readiness(rule) if rule.mig is not None else "")
    deferred = (f"{', '.join(names)}: {goal}",) if goal else ()
    yield replace(ready[0], deferred=deferred)
    yield from ready[1:]


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

    def planned() -> Plan:
        for name in absent:
            find_parents(host, name)  # raises with the reason
        refuse_if_any(impossible(case, rule, known, shares))
        if waits:
            return _without_surplus(case, shares)
        parts = (
            _without_surplus(case, shares),
            _with_missing(host, rule, shares),
            vgpu_shares.plan_kept(case, shares.kept),
        )
        return together(host, "", parts)

    part = attempt(names[0], planned, tuple(_differences(shares, known, names)))
    requests = " and ".join(map(_told, rule.vgpus))
    return replace(
        part,
        differences=part.differences or tuple(vgpu_shares.differences(host, shares.kept)),
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
        new = [one for step in plan.steps if (one := _made_by(narrow, step)) is not None]
        parameters = [
            vgpu_shares.setting(one.name, None, lacking.request)
            for one in new
            if lacking.request.parameters
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
            family = next(p.family for p in host.vgpus.parents if p.name == parent)
            return make(uuid=None, family=family, parent=parent, type=str(step.after))
        case _:
            return None


# ---- what differs


def _differences(
    shares: Shares, known: Iterable[Gpu], names_of_rule: Iterable[str]
) -> Iterator[Difference]:
    for lacking, names in shares.missing:
        where = ", ".join(gpu.name for gpu in lacking.scope) or ", ".join(names_of_rule)
        device = lacking.scope[0].device if len(lacking.scope) == 1 else None
        found, wanted = lacking.there, lacking.there + len(names)
        named = f" ({', '.join(names)})" if lacking.request.uuids and shares.surplus else ""
        told = f"{found} x {lacking.request}", f"{wanted} x {lacking.request}{named}"
        yield Difference(where, device.name if device else "", *told)
    for gpu in known:
        model = gpu.device.name if gpu.device else ""
        for one in shares.surplus:
            if one in gpu.instances:
                yield Difference(gpu.name, model, f"{one}, {gpu.type_of(one) or one.type}", "none")
