"""Plans that switch a GPU between host, passthrough and vGPUs in one run.

Each part is planned on the expected result of the previous parts, so that a refusal of any part
comes before the first change.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, assert_never

from msgspec import Struct, field
from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, blocker, refuse_if_any
from vfiomgr.engine.plan import Plan, Step, joined
from vfiomgr.engine.registry import plans, resolves
from vfiomgr.gpu import plan
from vfiomgr.gpu.requests import SetGpuMode, SwitchCheckpoint, SwitchGpu
from vfiomgr.passthrough import guards
from vfiomgr.passthrough import plan as passthrough_plan
from vfiomgr.passthrough.readiness_hints import how_to_bind
from vfiomgr.passthrough.steps import Bind, Unbind
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.sriov import plan as sriov_plan
from vfiomgr.sriov.steps import FunctionsCheckpoint, SetVirtualFunctions
from vfiomgr.vgpu import plan as vgpu_plan
from vfiomgr.vgpu import projection
from vfiomgr.vgpu.absence import absence
from vfiomgr.vgpu.capacity import gpus
from vfiomgr.vgpu.functions import lacks_vgpu_functions
from vfiomgr.vgpu.instance_plan import exchange_instances, present_instances, unmovable_instances
from vfiomgr.vgpu.model import MARKS, Vgpu
from vfiomgr.vgpu.steps import RemoveVgpu, SetPersistence

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_NVIDIA = "nvidia"
_USES = {
    "host": "switch {} to its host driver",
    "passthrough": "switch {} to passthrough",
    "vgpu": "switch {} to vGPUs",
}


class _SwitchPlan(Struct):
    """The parts of a plan so far, and the resulting host."""

    host: HostSnapshot
    request: SwitchGpu
    checkpoint: SwitchCheckpoint
    parts: list[Plan] = field(default_factory=list)

    @property
    def device(self) -> PciDevice:
        """The GPU after the parts so far."""
        return self.host.device(self.request.address)

    def add(self, part: Plan, host: HostSnapshot) -> None:
        """Append a part, with the resulting host."""
        self.parts.append(part)
        self.host = host

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of all parts in order."""
        return tuple(step for part in self.parts for step in part.steps)


@plans(SwitchGpu)
def plan_switch(
    host: HostSnapshot, request: SwitchGpu, checkpoint: SwitchCheckpoint | None = None
) -> Plan:
    """Switch a GPU to a use, from any other use.

    Raises:
        Refusal: a safety check forbids a part of it; nothing was changed.
        UnknownDevice: the address is not found.
    """
    return brought(host, request, checkpoint)[0]


def brought(
    host: HostSnapshot,
    request: SwitchGpu,
    checkpoint: SwitchCheckpoint | None = None,
    bind: Bind | None = None,
) -> tuple[Plan, HostSnapshot]:
    """Plan a switch, and return the resulting host, without functions bound to VFIO.

    `bind` is the request to use for passthrough instead of the default; it may name more functions.
    """
    device = host.device(request.address)
    refuse_if_any([*guards.stuck(host, device), *_no_gpu(host, device)])
    course = _SwitchPlan(host, request, checkpoint or SwitchCheckpoint())
    match request.to:
        case "host":
            _give_back(course)
            _clear(course)
        case "passthrough":
            _to_passthrough(course, bind or Bind((request.address,), allow=request.allow))
        case "vgpu":
            _to_vgpu(course)
            if not course.steps and request.functions != 0:
                refuse_if_any(_without_vgpus(course))
        case _ as never:
            assert_never(never)
    course.add(Plan("", tuple(_forgotten_marks(course))), course.host)
    return _joined(course), course.host


@resolves(SwitchGpu)
def resolve(
    host: HostSnapshot, request: SwitchGpu, checkpoint: SwitchCheckpoint | None = None
) -> SwitchCheckpoint:
    """Record the state of the host before the switch."""
    device = host.device(request.address)
    found = SwitchCheckpoint(
        vgpus=tuple(v.name for v in plan.vgpus_on(host, device) if host.vgpus.is_own(v)),
        autoprobe=device.sriov_drivers_autoprobe,
    )
    if request.to == "vgpu":
        found = replace(found, instances=present_instances(host, device))
        if device.sriov_totalvfs:
            mode = host.vgpus.mode_of(device)
            mixed = None if mode is None else mode.heterogeneous is True
            found = replace(found, functions=device.sriov_totalvfs, heterogeneous=mixed)
    if checkpoint is None:
        return found
    vgpus = tuple(dict.fromkeys((*checkpoint.vgpus, *found.vgpus)))
    return replace(checkpoint.completed(found), vgpus=vgpus)


def _to_passthrough(course: _SwitchPlan, bind: Bind) -> None:
    if not course.device.is_on_vfio:
        _clear(course)
        _end_persistence(course)
    course.add(passthrough_plan.plan_bind(course.host, bind), course.host)


def _to_vgpu(course: _SwitchPlan) -> None:
    _give_back(course)
    if course.host.vgpus.has_nvidia_vgpu is False and course.device.driver == _NVIDIA:
        refuse_if_any(_without_vgpus(course))
    device, known = course.device, course.checkpoint
    wanted, mixed = course.request.functions, course.request.heterogeneous
    if wanted is None:
        wanted = device.sriov_totalvfs if known.functions is None else known.functions
    mixed = known.heterogeneous if mixed is None else mixed
    if known.autoprobe is not None and wanted and device.sriov_totalvfs:
        # An interrupted run may have found the GPU on a driver with a higher limit.
        wanted = min(wanted, device.sriov_totalvfs)
    if wanted is None and not mixed:
        return  # the GPU itself is the vGPU parent
    if mixed:
        mode = course.host.vgpus.mode_of(device)
        refuse_if_any(plan.unmixable(device, mode))
    if wanted and device.sriov_numvfs and lacks_vgpu_functions(course.host, device):
        _set_functions(course, 0)
        device = course.device
    if wanted != device.sriov_numvfs:
        _remove_vgpus(course)
        _set_functions(course, wanted or 0, heterogeneous=mixed)
        return
    if known.instances is not None:
        steps = exchange_instances(course.host, device, known.instances)
        course.add(Plan("", steps), course.host)
    if mixed is not None and device.driver == _NVIDIA and not (mixed and _shows_sizes(course)):
        change = SetGpuMode(device.address, heterogeneous=mixed)
        course.add(plan.plan_mode(course.host, change), course.host)


def _without_vgpus(course: _SwitchPlan) -> Iterator[Diagnostic]:
    """Refuse a GPU if neither it nor its virtual functions support vGPUs."""
    device = course.device
    if device.driver != _NVIDIA and device.virtual_functions:
        return
    names = {str(device.address), *map(str, device.virtual_functions)}
    if course.host.vgpus.parent_names.isdisjoint(names) and not plan.vgpus_on(course.host, device):
        found = absence(course.host, device)
        yield blocker("no-vgpus", device, f"{device} {found.cause}", found.remedy)


def _shows_sizes(course: _SwitchPlan) -> bool:
    """Whether the vGPUs show heterogeneous mode, which nvidia-smi does not report."""
    if course.host.vgpus.mode_of(course.device) is not None:
        return False
    name = str(course.device.address)
    return any(gpu.name == name and gpu.is_heterogeneous for gpu in gpus(course.host))


def _give_back(course: _SwitchPlan) -> None:
    """Unbind the GPU from VFIO, or complete an interrupted unbind."""
    device, request = course.device, course.request
    slot = (device,) if request.only else course.host.slot(device)
    if not any(d.is_on_vfio or course.host.origin(d) is not None for d in slot):
        return
    refuse_if_any(_unknown_driver(course.host, device))
    unbind = Unbind((device.address,), only=request.only, allow=request.allow)
    part = passthrough_plan.plan_unbind(course.host, unbind)
    course.add(part, projection.given_back(course.host, slot))


def _clear(course: _SwitchPlan) -> None:
    """Remove all vGPUs, virtual functions and GPU instances."""
    _remove_vgpus(course)
    if course.device.sriov_numvfs:
        _set_functions(course, 0)
        return
    refuse_if_any(unmovable_instances(course.host, course.device))
    steps = exchange_instances(course.host, course.device, ())
    course.add(Plan("", steps), projection.without_instances(course.host, course.device))


def _remove_vgpus(course: _SwitchPlan) -> None:
    here = plan.vgpus_on(course.host, course.device)
    refuse_if_any(
        [
            *_foreign(course.host, course.device, here),
            *_in_instances(course.host, course.device, here),
        ]
    )
    if here:
        removal = RemoveVgpu(tuple(v.name for v in here), allow=course.request.allow & {"in-use"})
        part = vgpu_plan.plan_remove(course.host, removal)
        course.add(part, projection.without_vgpus(course.host, here))


def _set_functions(course: _SwitchPlan, count: int, *, heterogeneous: bool | None = None) -> None:
    device, known = course.device, course.checkpoint
    wanted = SetVirtualFunctions(
        device.address,
        count,
        autoprobe=course.request.autoprobe or device.driver == _NVIDIA,
        vectors=course.request.vectors if count else None,
    )
    checkpoint = FunctionsCheckpoint(
        known.autoprobe, heterogeneous if count else None, known.instances if count else ()
    )
    part = sriov_plan.plan_set(course.host, wanted, checkpoint)
    then = projection.with_functions(course.host, device, count)
    course.add(part, then if count else projection.without_instances(then, device))


def _end_persistence(course: _SwitchPlan) -> None:
    """Turn persistence mode off, in which NVIDIA's driver never releases the GPU."""
    device = course.device
    if course.host.users.in_persistence_mode(device.address):
        step = SetPersistence(device.identity, before=True, after=False)
        course.add(Plan("", (step,)), projection.without_persistence(course.host, device))


def _forgotten_marks(course: _SwitchPlan) -> Iterator[Step]:
    """Delete the marks of vGPUs that an interrupted run removed."""
    there = {vgpu.name for vgpu in course.host.vgpus.active}
    taken = {step.path for step in course.steps if isinstance(step, ReplaceFile)}
    files = {MARKS / name for name in course.checkpoint.vgpus if name not in there} - taken
    for mark in course.host.vgpus.marks:
        if mark.path in files:
            yield ReplaceFile(mark.path, mark.text, None)


def _no_gpu(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    if device.physical_function is not None:
        yield blocker(
            "not-a-gpu",
            device,
            f"{device} is a virtual function",
            f"name its GPU, {device.physical_function}; for the virtual function itself: "
            + (
                "it is ready for a guest"
                if host.vgpus.is_ready_for_guests(device)
                else how_to_bind(host, [device])
            ),
        )
    elif device.is_bridge:
        yield blocker(
            "bridge", device, f"{device} is a bridge", "name a GPU; list them with: vfiomgr list"
        )


def _unknown_driver(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    if device.is_on_vfio and host.origin(device) is None:
        yield blocker(
            "original-driver-unknown",
            device,
            f"the original driver of {device} was not saved before {device.driver}",
            f"unbind it first: vfiomgr unbind {device.address}",
        )


def _foreign(host: HostSnapshot, device: PciDevice, here: list[Vgpu]) -> Iterator[Diagnostic]:
    foreign = [vgpu.name for vgpu in here if not host.vgpus.is_own(vgpu)]
    if foreign:
        yield blocker(
            "unmanaged-vgpus",
            device,
            f"{device} has vGPUs that vfiomgr did not create: {', '.join(foreign)}",
            f"remove them first: vfiomgr vgpu remove {' '.join(foreign)}",
        )


def _in_instances(host: HostSnapshot, device: PciDevice, here: list[Vgpu]) -> Iterator[Diagnostic]:
    """Refuse vGPUs in GPU instances that nvidia-smi does not report: no rollback is possible."""
    mode = host.vgpus.mode_of(device)
    is_known = host.vgpus.partition_of(str(device.address)) is not None
    if here and mode is not None and mode.mig and not is_known:
        names = [vgpu.name for vgpu in here]
        yield blocker(
            "vgpus-in-gpu-instances",
            device,
            f"{device} has vGPUs in GPU instances (MIG) that a rollback cannot restore: "
            + ", ".join(names),
            f"remove them first: vfiomgr vgpu remove {' '.join(names)}",
        )


def _joined(course: _SwitchPlan) -> Plan:
    request = course.request
    whole = joined(_USES[request.to].format(request.address), course.parts)
    already = whole.already or (f"{course.device} already has this use",)
    return replace(
        whole,
        already=already if whole.is_empty else (),
        resolves=tuple(dict.fromkeys([str(request.address), *whole.resolves])),
    )
