"""Making vGPUs as they are defined, and removing them without forgetting what they are to be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.definitions.model.vgpu import Attributes, differing
from vfiomgr.definitions.plan import ambiguous, canonical, find_type, parent_named, types_of
from vfiomgr.definitions.requests import MissingVgpus, StartVgpu, StopVgpu
from vfiomgr.diagnostic import blocker, refusal
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import Plan, joined
from vfiomgr.engine.registry import plans, resolves
from vfiomgr.errors import UnknownDevice, VfiomgrError
from vfiomgr.passthrough import guards
from vfiomgr.paths import MDEV_DEVICES, PCI_DEVICES
from vfiomgr.pci.model import is_address
from vfiomgr.value import Value
from vfiomgr.vgpu import gpu_instances
from vfiomgr.vgpu import plan as vgpu_plan
from vfiomgr.vgpu.attributes import PARAMETERS
from vfiomgr.vgpu.capacity import gpus, room
from vfiomgr.vgpu.mig.steps import SetGpuInstances
from vfiomgr.vgpu.requests import CreateCheckpoint, CreateVgpu, RemoveVgpu
from vfiomgr.vgpu.steps import SetVgpuAttribute

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.definitions.model.gpu import FunctionDefinition
    from vfiomgr.definitions.model.vgpu import VgpuDefinition
    from vfiomgr.paths import HostPath
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu, VgpuParent, VgpuType


class Target(Value):
    """A vGPU as it is defined, of either family."""

    name: str
    parent: str
    type_id: str
    type_name: str | None
    attributes: Attributes

    @property
    def directory(self) -> HostPath:
        """Where its attributes are."""
        return (PCI_DEVICES if is_address(self.name) else MDEV_DEVICES) / self.name

    def __str__(self) -> str:
        """`vGPU f715f63c-…`."""
        return f"vGPU {self.name}"


@plans(StartVgpu)
def plan_start(
    host: HostSnapshot, request: StartVgpu, checkpoint: MissingVgpus | None = None
) -> Plan:
    """Make vGPUs as they are defined; what is missing of one that is active, too.

    Raises:
        UnknownDevice: there is no such definition, or its parent is not there.
        Refusal: another vGPU has the name, or there is no room.

    """
    begun = made_by(checkpoint)
    plans = [started(host, _target(host, name, request.parent), begun) for name in request.names]
    return together(host, f"start vGPU {', '.join(request.names)}", plans)


@resolves(StartVgpu)
def resolve(
    host: HostSnapshot, request: StartVgpu, checkpoint: MissingVgpus | None = None
) -> MissingVgpus:
    """Find those that the run makes."""
    return MissingVgpus(made_by(checkpoint) or missing(host, request.names))


def made_by(checkpoint: MissingVgpus | None) -> tuple[str, ...]:
    """The vGPUs that an interrupted run was to make."""
    return () if checkpoint is None else checkpoint.missing


def missing(host: HostSnapshot, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the names that no vGPU has."""
    return tuple(name for name in names if host.vgpu(name) is None)


@plans(StopVgpu)
def plan_stop(host: HostSnapshot, request: StopVgpu) -> Plan:
    """Remove vGPUs that have definitions, and keep these.

    Raises:
        Refusal: a guest holds one of them.

    """
    made = vgpu_plan.plan_remove(host, RemoveVgpu(request.names, allow=request.allow))
    active = [found for name in request.names if (found := host.vgpu(name)) is not None]
    defined = [target for target in targets(host) if target.name in request.names]
    names = {target.name for target in defined}
    return replace(
        made,
        summary=f"stop vGPU {', '.join(request.names)}",
        locks=tuple(sorted({*made.locks, *(_parent_lock(host, t.parent) for t in defined)})),
        notes=(
            *(
                f"{v} has no definition: it does not come back"
                for v in active
                if v.name not in names
            ),
            *made.notes,
        ),
    )


def _gpu_locks(host: HostSnapshot, active: Vgpu) -> Iterator[str]:
    """What a run that made the vGPU, and was cut off, had: any function of its GPU."""
    for gpu in gpus(host):
        if active in gpu.instances:
            yield _parent_lock(host, gpu.name)
            yield from (_parent_lock(host, parent.name) for parent in gpu.parents)


def _parent_lock(host: HostSnapshot, parent: str) -> str:
    """Also of a vGPU that is gone already: a run that was cut off had it."""
    device = host.device_named(parent)
    return f"parent-{parent}" if device is None else device_lock(device)


def targets(host: HostSnapshot) -> Iterator[Target]:
    """All that is defined, of both families."""
    yield from map(target_of, host.vgpu_definitions)
    for gpu in host.defined.gpus:
        yield from map(function_target, gpu.vgpus)


def target_of(definition: VgpuDefinition) -> Target:
    """A mediated device as it is defined."""
    parent, attributes = definition.parent, definition.attributes
    return Target(definition.uuid, parent, definition.type_id, None, attributes)


def function_target(function: FunctionDefinition) -> Target:
    """A virtual function as it is defined."""
    name = str(function.address)
    attributes = ((PARAMETERS, function.parameters),) if function.parameters.strip() else ()
    return Target(name, name, function.type_id, function.type_name, attributes)


def _target(host: HostSnapshot, name: str, parent: str | None) -> Target:
    """The definition of a name; of several the one whose parent is there.

    Raises:
        UnknownDevice: there is none.
        Refusal: several are there.

    """
    found = [target for target in targets(host) if target.name == name]
    if parent is not None:
        found = [target for target in found if target.parent == canonical(parent)]
    here = [target for target in found if parent_named(host, target.parent) is not None]
    if len(here or found) > 1:
        raise ambiguous([d for d in host.vgpu_definitions if d.uuid == name])
    if not found:
        raise _undefined(host, name)
    return (here or found)[0]


def _undefined(host: HostSnapshot, name: str) -> VfiomgrError:
    for problem in host.vgpu_definition_problems:
        if problem.path.endswith(f"/{name}"):
            message = f"the definition of vGPU {name} cannot be used: {problem.reason}"
            return refusal(
                [
                    blocker(
                        "definition-unusable",
                        name,
                        message,
                        f"mend {problem.path}, or vfiomgr vgpu undefine {name}",
                    )
                ]
            )
    return UnknownDevice(
        f"there is no definition of vGPU {name}",
        "vfiomgr vgpu list --defined shows all; vfiomgr vgpu define makes one",
    )


def started(host: HostSnapshot, target: Target, begun: tuple[str, ...] = ()) -> Plan:
    """From what there is of a vGPU to all that is defined of it.

    One of those that were `begun` gets the mark of what vfiomgr made; else somebody else made it.
    """
    active = host.vgpu(target.name)
    if active is not None:
        return _completed(host, target, active, is_own=target.name in begun)
    parent, kind = _place(host, target)
    place = CreateCheckpoint(((parent.name, kind.id),))
    made = vgpu_plan.plan_create(host, CreateVgpu((target.name,)), place)
    steps = (_attribute(target, name, None, text) for name, text in target.attributes)
    return replace(made, steps=(*made.steps, *steps))


def _completed(host: HostSnapshot, target: Target, active: Vgpu, *, is_own: bool) -> Plan:
    """What a start that was cut off had left out, or somebody changed since.

    Raises:
        Refusal: the vGPU is another one than is defined.

    """
    if (active.parent, active.type) != (target.parent, target.type_id):
        message = f"{active} is a {active.type} on {active.parent}, and defined as"
        message += f" {target.type_id} on {target.parent}"
        raise refusal(
            [blocker("vgpu-differs", active, message, f"vfiomgr vgpu stop {target.name} first")]
        )
    place = CreateCheckpoint(((active.parent, active.type),))
    present = vgpu_plan.plan_create(host, CreateVgpu((target.name,)), place)
    present = replace(present, locks=tuple(sorted({*present.locks, *_gpu_locks(host, active)})))
    marks = present.steps if is_own else ()
    found = dict(host.defined.attributes_of(target.name))
    wrong = differing(target.attributes, found.items())
    users = [o.summary for o in guards.held_by_guest(host, active)] if wrong else []
    if users:
        names = ", ".join(name for name, _ in wrong)
        why = f"{names} is not as defined, and is left so: {'; '.join(users)}"
        return replace(present, steps=marks, notes=(why,))
    steps = (*marks, *(_attribute(target, name, found[name], text) for name, text in wrong))
    already = () if steps else (f"{active} is active already",)
    return replace(present, steps=steps, already=already)


def _place(host: HostSnapshot, target: Target) -> tuple[VgpuParent, VgpuType]:
    """Where the vGPU is made, and of which type.

    Raises:
        UnknownDevice: the parent, or the type, is not there.
        Refusal: there is no room, or the number means another type by now.

    """
    absence = absence_of(host, target)
    if absence is not None:
        raise UnknownDevice(absence, "load its driver; vfiomgr vgpu types shows what there is")
    parent = parent_named(host, target.parent)
    assert parent is not None  # noqa: S101 - it is not absent
    kind = find_type(types_of(host, parent), target.type_id, target.parent)
    if target.type_name is not None and kind.name not in (None, target.type_name):
        message = f"{target} was defined as {target.type_name}, and {kind.id} is {kind.name} now"
        raise refusal(
            [
                blocker(
                    "vgpu-type-renumbered",
                    target,
                    message,
                    "define it anew: the numbers of another driver differ",
                )
            ]
        )
    gpu = next(known for known in gpus(host) if known.name == parent.gpu)
    found = room(gpu, kind)
    if not found.more and not found.makeable:
        message = f"{target.parent} has no room for another {kind}: {found.why_not}"
        raise refusal(
            [
                blocker(
                    "vgpu-no-room",
                    target.parent,
                    message,
                    "remove one with vfiomgr vgpu remove; vgpu types shows what fits",
                )
            ]
        )
    return parent, kind


def absence_of(host: HostSnapshot, target: Target) -> str | None:
    """Why the vGPU cannot be made yet, whatever else is in order."""
    if parent_named(host, target.parent) is not None:
        return None
    if host.device_named(target.parent) is not None:
        return f"{target.parent} makes no vGPUs now"
    return f"there is no device {target.parent} that makes vGPUs"


def _attribute(target: Target, name: str, before: str | None, after: str) -> SetVgpuAttribute:
    return SetVgpuAttribute(target.name, target.directory, name, before, after)


def together(host: HostSnapshot, summary: str, plans: Sequence[Plan]) -> Plan:
    """One plan of several; the GPU instances (MIG) that vGPUs need are counted for all of them.

    Raises:
        Refusal: GPU instances for all of them do not fit.

    """
    whole = joined(summary, plans)
    instances = gpu_instances.needed(host, whole.steps)
    counted = {step.device.address for step in instances}
    steps = (
        step
        for step in whole.steps
        if not (isinstance(step, SetGpuInstances) and step.device.address in counted)
    )
    return replace(whole, steps=(*instances, *steps))
