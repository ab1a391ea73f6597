"""What nvidia-smi means by the number that it ends with (NVML: nvmlReturn_t)."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from vfiomgr.engine.registry import performs
from vfiomgr.engine.verified_write import require_runnable, require_same_device
from vfiomgr.errors import HostError, ProgramFailed
from vfiomgr.vgpu.mig.facts.instances import read_instances
from vfiomgr.vgpu.mig.facts.modes import read_mode, read_persistence
from vfiomgr.vgpu.mig.model import counted
from vfiomgr.vgpu.mig.steps import (
    ModeStep,
    SetGpuInstances,
    SetHeterogeneous,
    SetMig,
    SetPersistence,
    instance_command,
)

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.vgpu.mig.model import GpuInstance, InstancePlace


NOT_FOUND = 6
IN_USE = 19

_CAUSES: dict[int, tuple[str, str]] = {
    2: (
        "the driver knows no such profile, or none at this place",
        "vfiomgr vgpu instances list shows profiles; drivers before 510 take no place after them",
    ),
    3: ("the GPU, or its driver, cannot do this", "vfiomgr vgpu mode shows what it can"),
    4: ("root's rights are missing here", "run as root, outside of a container"),
    NOT_FOUND: (
        "there is no such GPU in MIG mode, or no such instance any more",
        "vfiomgr vgpu mode shows the mode, vfiomgr vgpu instances list what is there",
    ),
    9: ("NVIDIA's driver is not loaded", "load it: modprobe nvidia"),
    15: ("the GPU fell off the bus", "only a power cycle of the device or the host brings it back"),
    IN_USE: (
        "something uses the instance: a vGPU, a process, or what watches GPUs (DCGM)",
        "vfiomgr vgpu instances list names vGPUs and processes: stop them, and e.g. nvidia-dcgm",
    ),
    23: (
        "it does not fit beside the instances that are there by now",
        "vfiomgr vgpu instances list shows them; run the command again",
    ),
}


def explained(error: ProgramFailed, subject: str) -> HostError:
    """The error with its cause and remedy, where the number is known."""
    cause, remedy = _CAUSES.get(
        error.status or 0, ("", "see what nvidia-smi says above, and dmesg (NVRM)")
    )
    message = f"{subject}: {cause}: {error.message}" if cause else f"{subject}: {error.message}"
    return HostError(message, remedy)


_Where = tuple[int, int]


@performs(SetGpuInstances)
def set_instances(tree: HostTree, step: SetGpuInstances) -> None:
    """Have the GPU instances that a step names, and not those that it takes away.

    Raises:
        HostError: nvidia-smi refuses it, or does not show it afterwards.

    """
    require_same_device(tree, step.device)
    require_runnable(tree, "nvidia-smi")
    there = _present(tree, step)
    staying = {_where(place) for place in step.after}
    for place in step.gone:
        instance = there.get(_where(place))
        if instance is not None and _where(place) not in staying:
            _destroy(tree, step, instance)
    there = _present(tree, step)
    for place in step.made:
        instance = there.get(_where(place))
        if instance is not None and instance.place.has_compute is not place.has_compute:
            _complete(tree, step, instance, place)
    missing = tuple(place for place in step.made if _where(place) not in there)
    for call in step.creations(missing):
        _call(tree, call, f"{step.device.address}: GPU instances {counted(missing)}")
    _verify(tree, step)


def _where(place: InstancePlace | GpuInstance) -> _Where:
    """What is of an instance for ever: its number is another one when it is made again."""
    return place.profile, place.start


def _present(tree: HostTree, step: SetGpuInstances) -> dict[_Where, GpuInstance]:
    return {_where(one): one for one in read_instances(tree, step.device.address)}


def _destroy(tree: HostTree, step: SetGpuInstances, instance: GpuInstance) -> None:
    """Compute instances first; they may be gone since an attempt that was cut off."""
    words = ["-dci", "-dgi"] if instance.compute_instances else ["-dgi"]
    for word in words:
        call = instance_command(step.device, word, "-gi", str(instance.id))
        _call(tree, call, f"{step.device.address}: {instance}")


def _complete(
    tree: HostTree, step: SetGpuInstances, instance: GpuInstance, place: InstancePlace
) -> None:
    """Give or take the compute instance of one that was cut off half-way."""
    word = "-cci" if place.has_compute else "-dci"
    call = instance_command(step.device, word, "-gi", str(instance.id))
    _call(tree, call, f"{step.device.address}: {instance}")


def _call(tree: HostTree, call: tuple[str, ...], subject: str) -> None:
    try:
        tree.call(*call, limit=None)  # whoever runs the step has a deadline
    except ProgramFailed as error:
        raise explained(error, subject) from error


def _verify(tree: HostTree, step: SetGpuInstances) -> None:
    there = {one.place for one in read_instances(tree, step.device.address)}
    missing = tuple(place for place in step.made if place not in there)
    left = tuple(place for place in step.gone if place in there)
    if missing or left:
        message = f"{step.device.address}: nvidia-smi shows GPU instances "
        message += counted(tuple(sorted(there, key=lambda place: place.start)))
        message += f"; missing: {counted(missing)}; left over: {counted(left)}"
        raise HostError(message, "see dmesg (NVRM), and vfiomgr vgpu instances list")


_UNKNOWN = "is NVIDIA's driver loaded, with its vGPU host part? see nvidia-smi -q"


@performs(SetHeterogeneous, SetMig, SetPersistence)
def set_mode(tree: HostTree, step: ModeStep) -> None:
    """Bring a GPU into the mode that a step names.

    Raises:
        HostError: nvidia-smi refuses it, or does not show it afterwards.

    """
    require_same_device(tree, step.device)
    require_runnable(tree, "nvidia-smi")
    if _current(tree, step) is step.after:
        return
    try:
        tree.call(*step.command(), limit=None)  # whoever runs the step has a deadline
    except ProgramFailed as error:
        raise _explained(step, error) from error
    found = _current(tree, step)
    if found is not step.after:
        shown = {True: "Enabled", False: "Disabled", None: "nothing"}[found]
        message = f"{step.device.address}: nvidia-smi shows {shown} after {step.commands()[0]}"
        raise HostError(message, _why_not(tree, step))


def _current(tree: HostTree, step: ModeStep) -> bool | None:
    address = step.device.address
    if isinstance(step, SetPersistence):
        return read_persistence(tree, address)
    mode = read_mode(tree, address)
    if mode is None:
        return None
    match step:
        case SetHeterogeneous():
            return mode.heterogeneous
        case SetMig():
            return mode.mig
        case _ as never:
            assert_never(never)


def _explained(step: ModeStep, error: ProgramFailed) -> HostError:
    if error.status == IN_USE:
        message = f"{step.device.address} carries a vGPU, or is in use: {error.message}"
        return HostError(message, "remove its vGPUs first; vfiomgr vgpu list shows all")
    remedy = "see what nvidia-smi says above, and dmesg (NVRM)"
    if isinstance(step, SetHeterogeneous):
        remedy = "the GPU has to have its virtual functions, and no MIG; " + remedy
    return HostError(error.message, remedy)


def _why_not(tree: HostTree, step: ModeStep) -> str:
    mode = read_mode(tree, step.device.address) if isinstance(step, SetMig) else None
    if mode is not None and mode.pending_mig is step.after:
        return (
            f"it waits for a reset of the GPU: stop all that uses it, then nvidia-smi --gpu-reset "
            f"-i {step.device.address}"
        )
    return _UNKNOWN
