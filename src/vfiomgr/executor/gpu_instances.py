"""GPU instances (MIG), by nvidia-smi, and making sure of them.

nvidia-smi makes one after the other and leaves those before the one that failed; a compute instance
keeps its GPU instance from being destroyed. So each is looked for before anything is done to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import HostError, ProgramFailed
from vfiomgr.executor import nvml
from vfiomgr.executor.writing import require_runnable, require_same_device
from vfiomgr.host.nvidia_instances import read_instances
from vfiomgr.model.gpu_instance import counted
from vfiomgr.model.gpu_step import instance_command

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.gpu_instance import GpuInstance, InstancePlace
    from vfiomgr.model.gpu_step import SetGpuInstances

_Where = tuple[int, int]


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
        raise nvml.explained(error, subject) from error


def _verify(tree: HostTree, step: SetGpuInstances) -> None:
    there = {one.place for one in read_instances(tree, step.device.address)}
    missing = tuple(place for place in step.made if place not in there)
    left = tuple(place for place in step.gone if place in there)
    if missing or left:
        message = f"{step.device.address}: nvidia-smi shows GPU instances "
        message += counted(tuple(sorted(there, key=lambda place: place.start)))
        message += f"; missing: {counted(missing)}; left over: {counted(left)}"
        raise HostError(message, "see dmesg (NVRM), and vfiomgr vgpu instances list")
