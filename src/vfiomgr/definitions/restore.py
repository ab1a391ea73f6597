"""Start autostart vGPUs: GPUs first, then their vGPUs; a failure does not stop the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from vfiomgr.definitions.model import Definition, GpuDefinition, canonical
from vfiomgr.definitions.plan import parent_named
from vfiomgr.definitions.requests import MissingVgpus, RestoreVgpus
from vfiomgr.definitions.start import (
    absence_of,
    made_by,
    missing,
    started,
    together,
)
from vfiomgr.diagnostic import refuse
from vfiomgr.engine.plan import Plan, Step
from vfiomgr.engine.registry import plans, resolves
from vfiomgr.engine.transaction import ApplyContext, apply, once
from vfiomgr.errors import RollbackIncomplete, VfiomgrError
from vfiomgr.gpu import plan as gpu_plan
from vfiomgr.gpu.plan import gpu_locks
from vfiomgr.gpu.requests import GpuModeCheckpoint, SetGpuMode
from vfiomgr.sriov import plan as sriov_plan
from vfiomgr.sriov.steps import FunctionsCheckpoint, SetVirtualFunctions
from vfiomgr.value import Value
from vfiomgr.vgpu.functions import makes_by_program
from vfiomgr.vgpu.instance_plan import missing_instances
from vfiomgr.vgpu.projection import with_functions

if TYPE_CHECKING:
    from vfiomgr.engine.host import ManagedHost
    from vfiomgr.engine.run import Outcome
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


class RestorableVgpu(Value):
    """A vGPU to start, or a GPU to prepare; each may fail separately."""

    name: str
    """The name of a vGPU, or of a GPU to prepare for its vGPUs."""
    parent: str
    type: str
    gpu: str
    """The GPU; candidates of one GPU are started together."""
    plan: Plan | None = None
    why_not: str | None = None
    is_waiting: bool = False
    """Its device may still appear."""
    after: str | None = None
    """The candidate that must be started first."""

    def __str__(self) -> str:
        """`vGPU f715f63c-… (mtty-2 on mtty)`."""
        return f"vGPU {self.name} ({self.type} on {self.parent})" if self.type else self.name


@plans(RestoreVgpus)
def plan_restore(
    host: HostSnapshot, request: RestoreVgpus, checkpoint: MissingVgpus | None = None
) -> Plan:
    """Plan all vGPUs that can be started, with notes about the rest."""
    found = [
        candidate
        for candidate in candidates(host, request, checkpoint)
        if not request.only or candidate.name in request.only
    ]
    plans = [candidate.plan for candidate in found if candidate.plan is not None]
    made = together(host, "restore autostart vGPUs", plans)
    notes = [f"{c}: {c.why_not}" for c in found if c.why_not is not None]
    notes += [f"{c}: starts after {c.after} is ready" for c in found if c.after is not None]
    return replace(made, notes=(*made.notes, *notes))


@resolves(RestoreVgpus)
def resolve(
    host: HostSnapshot, request: RestoreVgpus, checkpoint: MissingVgpus | None = None
) -> MissingVgpus:
    """Record the vGPUs that the run creates."""
    found = candidates(host, request, checkpoint)
    names = (candidate.name for candidate in found if candidate.type)
    return MissingVgpus(made_by(checkpoint) or missing(host, names))


def candidates(
    host: HostSnapshot, request: RestoreVgpus, checkpoint: MissingVgpus | None = None
) -> tuple[RestorableVgpu, ...]:
    """All autostart vGPUs, and GPUs to prepare before their vGPUs."""
    begun = made_by(checkpoint)
    parent = None if request.parent is None else canonical(request.parent)
    leaves_mdevs = request.boot and host.defined.is_started_by_mdevctl
    mdevs = [
        _mdev_candidate(host, definition, begun)
        for definition in host.defined.vgpus
        if definition.autostart and not leaves_mdevs and parent in (None, definition.parent)
    ]
    functions = [
        candidate
        for definition in host.defined.gpus
        for candidate in _function_candidates(host, definition, parent, begun)
    ]
    return (*functions, *mdevs)


def preparation(host: HostSnapshot, definition: GpuDefinition) -> Plan:
    """Plan virtual functions, modes and GPU instances of a GPU, before its vGPUs.

    sriov.plan_set also sets heterogeneous mode if NVIDIA's program creates the functions. MIG can
    change only without functions, so it comes first; it is turned on if defined, but never off, as
    its GPU instances may be in use. The available instances are known only after MIG is on, so they
    are planned in a second pass.

    Raises:
        Refusal: the GPU cannot be prepared.
    """
    device = host.device(definition.gpu.address)
    mode = host.vgpus.mode_of(device)
    if mode is not None and mode.mig and definition.mig is None:  # none of their types is available
        message = f"{device.address} is in MIG mode, but its vGPUs are defined without MIG"
        command = f"vfiomgr vgpu mode {device.address} --no-mig"
        remedy = f"turn MIG off: {command}; then run: vfiomgr vgpu restore"
        refuse("gpu-partitioned", device.address, message, remedy)
    needed = (str(function.address) for function in definition.autostarting)
    if all(host.device_named(name) is not None for name in needed):
        change = _change_of_modes(host, definition)
        if change is not None:
            return gpu_plan.plan_mode(host, change)
        return _divided(host, device, definition, Plan(f"prepare {device}", ()))
    if device.sriov_numvfs:
        message = f"{device} has {device.sriov_numvfs} virtual functions other than those defined"
        remedy = f"remove them: vfiomgr sriov set {device.address} 0"
        refuse("functions-not-as-defined", device, message, remedy)
    count = definition.virtual_functions
    if makes_by_program(host, device):  # all, including those defined
        count = device.sriov_totalvfs or count
    change = _change_of_modes(host, definition)
    if change is not None and change.mig:
        change = replace(change, heterogeneous=None)
        return gpu_plan.plan_mode(host, change, GpuModeCheckpoint(count))
    wanted = SetVirtualFunctions(device.address, count, autoprobe=True)
    modes = FunctionsCheckpoint(heterogeneous=definition.heterogeneous)
    functions = sriov_plan.plan_set(host, wanted, modes)
    return _divided(with_functions(host, device, count), device, definition, functions)


def _divided(
    host: HostSnapshot, device: PciDevice, definition: GpuDefinition, before: Plan
) -> Plan:
    """Add the missing GPU instances (MIG) to a plan; additional ones are ignored."""
    part = missing_instances(host, device, definition.mig or ())
    if part.is_empty:
        return before
    locks = {*before.locks, *gpu_locks(host, device)}
    return replace(before, steps=(*before.steps, *part.steps), locks=tuple(sorted(locks)))


def _change_of_modes(host: HostSnapshot, definition: GpuDefinition) -> SetGpuMode | None:
    """The modes that differ from the definition; allowing more sizes than defined is fine."""
    mode = host.vgpus.mode_of(host.device(definition.gpu.address))
    if mode is None:
        return None
    mixed = definition.heterogeneous and mode.heterogeneous is False
    mig = definition.mig is not None and mode.mig is False
    if not mixed and not mig:
        return None
    return SetGpuMode(
        definition.gpu.address, heterogeneous=True if mixed else None, mig=True if mig else None
    )


def _mdev_candidate(
    host: HostSnapshot, target: Definition, begun: tuple[str, ...]
) -> RestorableVgpu:
    parent = parent_named(host, target.parent)
    known = _candidate(target, parent.gpu if parent else target.parent)
    absence = absence_of(host, target) if host.vgpus.named(target.name) is None else None
    if absence is not None:
        return replace(known, why_not=f"{absence.message}; {absence.hint}", is_waiting=True)
    return _planned(host, known, target, begun)


def _candidate(target: Definition, gpu: str) -> RestorableVgpu:
    return RestorableVgpu(target.name, target.parent, target.type_name or target.type_id, gpu)


def _planned(
    host: HostSnapshot, known: RestorableVgpu, target: Definition, begun: tuple[str, ...]
) -> RestorableVgpu:
    try:
        return replace(known, plan=started(host, target, begun))
    except VfiomgrError as error:
        return replace(known, why_not=f"{error.message}; {error.hint}")


def _function_candidates(
    host: HostSnapshot, definition: GpuDefinition, parent: str | None, begun: tuple[str, ...]
) -> list[RestorableVgpu]:
    """The vGPUs of a GPU, or the GPU if it must be prepared first."""
    gpu = str(definition.gpu.address)
    targets = [one for one in definition.autostarting if parent in (None, gpu, one.name)]
    known = [_candidate(target, gpu) for target in targets]
    device = host.device_named(gpu)
    if device is None:
        return [replace(c, why_not=f"device not found: {gpu}", is_waiting=True) for c in known]
    if not device.identity.is_same_as(definition.gpu):
        why = f"{gpu} is a different device: {device.identity}, not {definition.gpu}"
        return [replace(c, why_not=why) for c in known]
    try:
        first = preparation(host, definition)
    except VfiomgrError as error:
        return [replace(c, why_not=f"{error.message}; {error.hint}") for c in known]
    if not first.is_empty:
        whole = RestorableVgpu(gpu, gpu, "", gpu, first)
        return [whole, *(replace(c, after=gpu) for c in known)] if known else []
    return [_planned(host, c, target, begun) for c, target in zip(known, targets, strict=True)]


State = Literal["restored", "already", "waiting", "failed"]


class Restored(Value):
    """The result for an autostart vGPU."""

    name: str
    parent: str
    type: str
    state: State
    reason: str | None = None
    """Why it failed, or what it waits for."""


def restore_vgpus(request: RestoreVgpus, work: ApplyContext) -> tuple[Restored, ...]:
    """Start all autostart vGPUs; a failure does not stop the others."""
    work = replace(work, on_note=once(work.on_note))
    return Restoration(request, lambda: work.scan(request), lambda part: apply(part, work)).run()


class Restoration:
    """One run over all autostart vGPUs."""

    def __init__(
        self,
        request: RestoreVgpus,
        scan: Callable[[], HostSnapshot],
        apply: Callable[[RestoreVgpus], Outcome],
    ) -> None:
        self._request = request
        self._scan = scan
        self._apply = apply
        self._found: tuple[RestorableVgpu, ...] = ()
        self._tried: set[tuple[str, tuple[Step, ...]]] = set()
        """Names and steps that were tried; a GPU may need further steps afterwards."""
        self._restored: set[str] = set()
        self._failures: dict[str, str] = {}

    def run(self) -> tuple[Restored, ...]:
        """Repeat until nothing is left, because vGPUs follow after their GPU is prepared."""
        while left := self._left():
            for _, batch in groupby(left, lambda candidate: candidate.gpu):
                self._bring_about(list(batch))
        awaited = {candidate.after for candidate in self._found}
        return tuple(self._told(c) for c in self._found if c.name not in awaited)

    def _left(self) -> list[RestorableVgpu]:
        self._found = candidates(self._scan(), self._request)
        return sorted(
            (
                c
                for c in self._found
                if c.plan and not c.plan.is_empty and (c.name, c.plan.steps) not in self._tried
            ),
            key=lambda candidate: candidate.gpu,
        )

    def _bring_about(self, batch: Sequence[RestorableVgpu]) -> None:
        """Start all at once; if that fails, start each one separately."""
        names = tuple(candidate.name for candidate in batch)
        self._tried.update((c.name, c.plan.steps) for c in batch if c.plan is not None)
        try:
            outcome = self._apply(replace(self._request, only=names))
        except RollbackIncomplete as error:  # the GPU may be stuck in the kernel
            self._fail(names, error)
        except VfiomgrError as error:
            if isinstance(error.__cause__, KeyboardInterrupt):
                raise
            if len(batch) > 1:
                for candidate in batch:
                    self._bring_about([candidate])
            else:
                self._fail(names, error)
        else:
            self._restored.update(names if outcome.is_changed else ())

    def _fail(self, names: Sequence[str], error: VfiomgrError) -> None:
        reason = f"{error.message}; {error.hint}" if error.hint else error.message
        self._failures.update(dict.fromkeys(names, reason))

    def _told(self, candidate: RestorableVgpu) -> Restored:
        told = Restored(candidate.name, candidate.parent, candidate.type, "already")
        failure = self._failures.get(candidate.name) or self._failures.get(candidate.after or "")
        if failure is not None:
            return replace(told, state="failed", reason=failure)
        if candidate.why_not is not None:
            state: State = "waiting" if candidate.is_waiting else "failed"
            return replace(told, state=state, reason=candidate.why_not)
        if candidate.name in self._restored:
            return replace(told, state="restored")
        notes = candidate.plan.notes if candidate.plan else ()
        return replace(told, reason="; ".join(notes) or None)


def restore(
    host: ManagedHost, parent: str | None = None, *, boot: bool = False
) -> tuple[Restored, ...]:
    """Start all autostart vGPUs (of `parent`); a failure does not stop the others.

    With `boot`, vGPUs that mdevctl starts at boot are left to it.

    Raises:
        NeedsRoot: changing the host requires root; nothing was changed.
    """
    with host.changing() as work:
        return restore_vgpus(RestoreVgpus(parent, boot=boot), work)
