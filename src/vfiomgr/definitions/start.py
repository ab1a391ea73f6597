"""Plans to start defined vGPUs, and to stop vGPUs without deleting their definitions.

libvirt accepts a definition of any type, and fails only when it starts; so what it is asked for is
checked here too.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.definitions.model import Definition, canonical, differing
from vfiomgr.definitions.plan import find_type, parent_named, refuse_ambiguous, types_of
from vfiomgr.definitions.requests import MissingVgpus, StartVgpu, StopVgpu
from vfiomgr.diagnostic import blocker, refusal, refuse
from vfiomgr.engine.plan import Plan, joined
from vfiomgr.engine.registry import plans, resolves
from vfiomgr.errors import UnknownDevice, VfiomgrError
from vfiomgr.passthrough import guards
from vfiomgr.vgpu import plan as vgpu_plan
from vfiomgr.vgpu.capacity import gpus, room
from vfiomgr.vgpu.functions import creation_of
from vfiomgr.vgpu.instance_plan import needed_instances
from vfiomgr.vgpu.steps import (
    CreateCheckpoint,
    CreateVgpu,
    RemoveVgpu,
    SetGpuInstances,
    SetVgpuAttribute,
)

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu, VgpuParent, VgpuType


@plans(StartVgpu)
def plan_start(
    host: HostSnapshot, request: StartVgpu, checkpoint: MissingVgpus | None = None
) -> Plan:
    """Start vGPUs as defined, and restore attributes of active ones.

    Raises:
        UnknownDevice: the definition or its parent is not found.
        Refusal: another vGPU has the name, or there is no room.
    """
    begun = made_by(checkpoint)
    plans = [started(host, _target(host, name, request.parent), begun) for name in request.names]
    return together(host, f"start vGPU {', '.join(request.names)}", plans)


@resolves(StartVgpu)
def resolve(
    host: HostSnapshot, request: StartVgpu, checkpoint: MissingVgpus | None = None
) -> MissingVgpus:
    """Record the vGPUs that the run creates."""
    return MissingVgpus(made_by(checkpoint) or missing(host, request.names))


def made_by(checkpoint: MissingVgpus | None) -> tuple[str, ...]:
    """The vGPUs that an interrupted run would have created."""
    return () if checkpoint is None else checkpoint.missing


def missing(host: HostSnapshot, names: Iterable[str]) -> tuple[str, ...]:
    """The names for which there is no active vGPU."""
    return tuple(name for name in names if host.vgpus.named(name) is None)


@plans(StopVgpu)
def plan_stop(host: HostSnapshot, request: StopVgpu) -> Plan:
    """Remove active vGPUs and keep their definitions.

    Raises:
        Refusal: a guest uses one of them.
    """
    made = vgpu_plan.plan_remove(host, RemoveVgpu(request.names, allow=request.allow))
    active = [found for name in request.names if (found := host.vgpus.named(name)) is not None]
    defined = [target for target in host.defined.every if target.name in request.names]
    names = {target.name for target in defined}
    return replace(
        made,
        summary=f"stop vGPU {', '.join(request.names)}",
        locks=tuple(
            sorted({*made.locks, *(vgpu_plan.parent_lock(host, t.parent) for t in defined)})
        ),
        notes=(
            *(
                f"{v} has no definition and cannot be started again"
                for v in active
                if v.name not in names
            ),
            *made.notes,
        ),
    )


def _gpu_locks(host: HostSnapshot, active: Vgpu) -> Iterator[str]:
    """The locks that an interrupted run which created the vGPU may have held."""
    for gpu in gpus(host):
        if active in gpu.instances:
            yield vgpu_plan.parent_lock(host, gpu.name)
            yield from (vgpu_plan.parent_lock(host, parent.name) for parent in gpu.parents)


def _target(host: HostSnapshot, name: str, parent: str | None) -> Definition:
    """Find the definition with this name; of several, the one whose parent exists."""
    found = [target for target in host.defined.every if target.name == name]
    if parent is not None:
        found = [target for target in found if target.parent == canonical(parent)]
    here = [target for target in found if parent_named(host, target.parent) is not None]
    if len(here or found) > 1:
        refuse_ambiguous([d for d in host.defined.vgpus if d.uuid == name])
    if not found:
        raise _undefined(host, name)
    return (here or found)[0]


def _undefined(host: HostSnapshot, name: str) -> VfiomgrError:
    for problem in host.defined.problems:
        if problem.path.endswith(f"/{name}"):
            message = f"cannot use the definition of vGPU {name}: {problem.reason}"
            return refusal(
                [
                    blocker(
                        "definition-unusable",
                        name,
                        message,
                        f"correct {problem.path}, or run: vfiomgr vgpu undefine {name}",
                    )
                ]
            )
    return UnknownDevice(
        f"vGPU definition not found: {name}", "list definitions with: vfiomgr vgpu list --defined"
    )


def started(host: HostSnapshot, target: Definition, begun: tuple[str, ...] = ()) -> Plan:
    """Plan the steps from the current state of a vGPU to its definition.

    A vGPU in `begun` is marked as created by vfiomgr; otherwise someone else created it.
    """
    active = host.vgpus.named(target.name)
    if active is not None:
        return _completed(host, target, active, is_own=target.name in begun)
    parent, kind = _place(host, target)
    place = CreateCheckpoint(((parent.name, kind.id),))
    made = vgpu_plan.plan_create(host, CreateVgpu((target.name,)), place)
    steps = (_attribute(target, name, None, text) for name, text in target.attributes)
    return replace(made, steps=(*made.steps, *steps))


def _completed(host: HostSnapshot, target: Definition, active: Vgpu, *, is_own: bool) -> Plan:
    """Plan what an interrupted start left out, or what was changed since."""
    if (active.parent, active.type) != (target.parent, target.type_id):
        message = f"{active} is a {active.type} on {active.parent}, but defined as"
        message += f" {target.type_id} on {target.parent}"
        refuse("vgpu-differs", active, message, f"stop it first: vfiomgr vgpu stop {target.name}")
    place = CreateCheckpoint(((active.parent, active.type),))
    present = vgpu_plan.plan_create(host, CreateVgpu((target.name,)), place)
    present = replace(present, locks=tuple(sorted({*present.locks, *_gpu_locks(host, active)})))
    marks = present.steps if is_own else ()
    found = dict(host.defined.attributes_of(target.name))
    wrong = differing(target.attributes, found.items())
    users = [o.summary for o in guards.assigned(host, active)] if wrong else []
    if users:
        names = ", ".join(name for name, _ in wrong)
        why = f"not changing {names}, which differs from the definition: {'; '.join(users)}"
        return replace(present, steps=marks, notes=(why,))
    steps = (*marks, *(_attribute(target, name, found[name], text) for name, text in wrong))
    already = () if steps else (f"{active} is already active",)
    return replace(present, steps=steps, already=already)


def _place(host: HostSnapshot, target: Definition) -> tuple[VgpuParent, VgpuType]:
    """Find the parent and type of a vGPU."""
    absence = absence_of(host, target)
    if absence is not None:
        raise absence
    parent = parent_named(host, target.parent)
    assert parent is not None  # noqa: S101 - it is not absent
    kind = find_type(types_of(host, parent), target.type_id, target.parent)
    if target.type_name is not None and kind.name not in (None, target.type_name):
        message = (
            f"vGPU {target.name} is defined as {target.type_name}, but {kind.id} is now {kind.name}"
        )
        refuse(
            "vgpu-type-renumbered",
            f"vGPU {target.name}",
            message,
            "define it again: another driver numbers types differently",
        )
    gpu = next(known for known in gpus(host) if known.name == parent.gpu)
    found = room(gpu, kind)
    if not found.more and not found.makeable:
        message = f"no capacity for another {kind} on {target.parent}: {found.why_not}"
        refuse(
            "vgpu-no-capacity",
            target.parent,
            message,
            found.remedy or "",
            "remove one with vfiomgr vgpu remove; list what fits with: vfiomgr vgpu list --types",
        )
    return parent, kind


def absence_of(host: HostSnapshot, target: Definition) -> UnknownDevice | None:
    """Return why the parent of a vGPU is unavailable; None if it is available."""
    if parent_named(host, target.parent) is not None:
        return None
    remedy = "load its driver, then check with: vfiomgr vgpu list --types"
    if host.device_named(target.parent) is not None:
        message = f"{target.parent} does not support vGPUs in its current state"
        return UnknownDevice(message, remedy)
    found = creation_of(host, target.parent)
    if found is None:
        return UnknownDevice(f"device not found: {target.parent}", remedy)
    gpu, command = found
    message = f"virtual function not found: {target.parent}"
    return UnknownDevice(message, f"create the virtual functions of {gpu.address}: {command}")


def _attribute(target: Definition, name: str, before: str | None, after: str) -> SetVgpuAttribute:
    return SetVgpuAttribute(target.name, target.directory, name, before, after)


def together(host: HostSnapshot, summary: str, plans: Sequence[Plan]) -> Plan:
    """Join several plans, with the GPU instances (MIG) that all of their vGPUs need.

    Raises:
        Refusal: GPU instances for all of them do not fit.
    """
    whole = joined(summary, plans)
    instances = needed_instances(host, whole.steps)
    counted = {step.device.address for step in instances}
    steps = (
        step
        for step in whole.steps
        if not (isinstance(step, SetGpuInstances) and step.device.address in counted)
    )
    return replace(whole, steps=(*instances, *steps))


# ---- vGPUs that libvirt defines and starts


def mdev_type(host: HostSnapshot, parent: PciAddress, wanted: str) -> str:
    """The identifier of a type, by name, on a parent.

    Raises:
        UnknownDevice: there is no such function or type.
        Refusal: the function does not support mediated devices.
    """
    device = host.device(parent)
    found = next((known for known in host.vgpus.parents if known.name == str(parent)), None)
    if found is None:
        message = f"{device} does not support vGPUs"
        remedy = "vfiomgr vgpu list --types shows the parents of this host"
        refuse("mdev-unsupported", device, message, remedy)
    if found.family != "mdev":
        message = f"the vGPUs of {device} are virtual functions, which libvirt cannot define"
        remedy = f"vfiomgr vgpu define {parent} --type {shlex.quote(wanted)}"
        refuse("mdev-unsupported", device, message, remedy)
    return find_type(types_of(host, found), wanted, str(parent)).id


def refuse_without_room(host: HostSnapshot, parent: str, type_id: str) -> None:
    """Make sure that a mediated device can be created now."""
    found = next((known for known in host.vgpus.parents if known.name == parent), None)
    if found is None:
        message = f"no such vGPU parent: {parent}"
        raise UnknownDevice(message, "load its driver; vfiomgr vgpu list --types shows the parents")
    if found.offers(type_id) == 0:
        message = f"{parent} has no capacity for another vGPU of type {type_id}"
        listed = f"vfiomgr vgpu list --types --parent {parent}"
        remedy = f"{listed} shows the reason and the remaining capacity"
        refuse("vgpu-no-capacity", parent, message, remedy)
