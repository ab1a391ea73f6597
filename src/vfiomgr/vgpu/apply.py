"""Perform steps on vGPUs, and steps with nvidia-smi, and verify the result."""

from __future__ import annotations

from contextlib import suppress
from errno import EINVAL, EIO
from typing import TYPE_CHECKING

from vfiomgr import paths
from vfiomgr.engine.registry import performs
from vfiomgr.engine.verified_write import (
    becomes_true,
    explaining,
    require_runnable,
    require_same_device,
)
from vfiomgr.errors import HostError, ProgramFailed, WriteFailed
from vfiomgr.passthrough.apply import NODE_DEADLINE, cdevs, let_udev_finish
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import pci_device
from vfiomgr.vgpu import facts, reader
from vfiomgr.vgpu.instance_model import GpuInstance, InstancePlace, counted_places
from vfiomgr.vgpu.model import is_same_text
from vfiomgr.vgpu.nvidia_smi import read_instances, read_mode, read_persistence
from vfiomgr.vgpu.steps import (
    AdoptVgpu,
    CreateMdev,
    ModeStep,
    RemoveMdev,
    SetGpuInstances,
    SetHeterogeneous,
    SetMig,
    SetPersistence,
    SetVgpuAttribute,
    SetVgpuType,
    instance_command,
)

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


@performs(SetVgpuAttribute)
def set_attribute(tree: HostTree, step: SetVgpuAttribute) -> None:
    """Write an attribute of a vGPU, unless it already has the value.

    Each driver formats attributes in its own way, so only numbers are compared afterwards.

    Raises:
        HostError: the vGPU has no such attribute, or the driver rejects the value.
    """
    target = _target(tree, step)
    current = tree.read(target)
    if current is not None and is_same_text(current, step.after):
        return
    with explaining("attribute", f"{step.attribute} of vGPU {step.vgpu}"):
        tree.write(target, step.written)
    found = (tree.read(target) or "").strip()
    wanted = step.after.strip()
    if found.isdecimal() and wanted.isdecimal() and int(found) != int(wanted):
        message = f"cannot set {step.attribute} of vGPU {step.vgpu} to {wanted}: it is {found}"
        raise HostError(message, "check dmesg for messages of the driver")


def _target(tree: HostTree, step: SetVgpuAttribute) -> HostPath:
    """Resolve the links of an attribute; `driver/unbind`, for example, is refused."""
    directory = tree.resolve(HostPath(step.directory))
    if directory is None:
        message = f"vGPU {step.vgpu} no longer exists"
        raise HostError(message, "list the active vGPUs with: vfiomgr vgpu list")
    target = tree.resolve(directory / step.attribute)
    if target is None:
        message = f"vGPU {step.vgpu} has no attribute {step.attribute}"
        raise HostError(message, f"list the attributes of its driver with: ls {directory}")
    if not target.startswith(f"{directory}/"):
        message = f"{step.attribute} of vGPU {step.vgpu} is a link to another object: {target}"
        raise HostError(message, "remove the attribute from the definition")
    return target


@performs(CreateMdev)
def create_mdev(tree: HostTree, step: CreateMdev) -> None:
    """Create a mediated device."""
    vgpu = facts.read_mdev(tree, step.uuid)
    if vgpu is None:
        target = paths.HostPath(step.parent_path) / facts.TYPES / step.type_id / "create"
        with explaining("mdev-create", f"vGPU {step.uuid} on {step.parent}"):
            tree.write(target, step.uuid)
        vgpu = facts.read_mdev(tree, step.uuid)
    if vgpu is None or (vgpu.parent, vgpu.type) != (step.parent, step.type_id):
        found = "not found" if vgpu is None else f"it is a {vgpu.type} on {vgpu.parent}"
        message = f"cannot create {step.type_id} vGPU {step.uuid} on {step.parent}: {found}"
        raise HostError(message, "check dmesg, and run: vfiomgr vgpu list")
    if vgpu.iommu_group is not None:
        node = paths.vfio_group_node(vgpu.iommu_group)
        if not becomes_true(lambda: tree.exists(node), NODE_DEADLINE):
            message = f"{node} did not appear"
            raise HostError(message, "check that udevd is running and that /dev is the host's own")
        let_udev_finish(tree, node)
    for cdev in cdevs(tree, paths.MDEV_DEVICES / step.uuid):
        let_udev_finish(tree, cdev)


@performs(RemoveMdev)
def remove_mdev(tree: HostTree, step: RemoveMdev) -> None:
    """Remove a mediated device."""
    target = paths.MDEV_DEVICES / step.uuid
    vgpu = facts.read_mdev(tree, step.uuid)
    if vgpu is None or (vgpu.parent, vgpu.type) != (step.parent, step.type_id):
        return  # already removed, or another vGPU with the same UUID
    with explaining("mdev-remove", f"vGPU {step.uuid} on {step.parent}"):
        tree.write(target / "remove", "1")
    if not becomes_true(lambda: not tree.exists(target), NODE_DEADLINE):
        message = f"cannot remove vGPU {step.uuid}: it still exists after the request"
        raise HostError(message, "check dmesg for messages of the driver")


@performs(SetVgpuType)
def set_type(tree: HostTree, step: SetVgpuType) -> None:
    """Set the vGPU type of a function, unless it is set: the driver rejects a second write."""
    require_same_device(tree, step.device)
    directory = pci_device(step.device.address)
    current = facts.read_current(tree, directory)
    if current is None:
        message = f"{step.device.address} has no {facts.CURRENT}: it lost its driver"
        raise HostError(message, "create the virtual functions again; check dmesg")
    if int(current) not in (step.before, step.after):
        message = f"{step.device.address} has changed to a vGPU of type {current}"
        raise HostError(message, "run the command again; list the vGPUs with: vfiomgr vgpu list")
    if int(current) != step.after:
        _write_type(tree, step)
    found = facts.read_current(tree, directory)
    if found != str(step.after):
        message = (
            f"cannot set the vGPU type of {step.device.address} to {step.after}: "
            f"the driver reports {found}"
        )
        raise HostError(message, "check dmesg for messages of the driver")
    if step.after:
        reader.unmark(tree, step.device.address)
    else:
        reader.disclaim(tree, step.device.address)


@performs(AdoptVgpu)
def adopt(tree: HostTree, step: AdoptVgpu) -> None:
    """Record that a vGPU is vfiomgr's own, or that it is not; the vGPU is not changed.

    Raises:
        HostError: the function has another type now, or the record cannot be written.
    """
    require_same_device(tree, step.device)
    address = step.device.address
    if not step.after:
        reader.disclaim(tree, address)
        return
    found = facts.read_current(tree, pci_device(address))
    if found != str(step.type):
        message = f"cannot adopt the vGPU of type {step.type} on {address}: its type is {found}"
        raise HostError(message, "run the command again; list the vGPUs with: vfiomgr vgpu list")
    reader.claim(tree, address, step.type)
    if not reader.is_made(tree, str(address), str(step.type)):
        message = f"cannot record the vGPU on {address} as vfiomgr's own"
        raise HostError(message, "check that /run is writable")


def _write_type(tree: HostTree, step: SetVgpuType) -> None:
    """Write the type; mark a function that rejects a type which its driver offers."""
    directory = pci_device(step.device.address)
    if step.after:
        reader.claim(tree, step.device.address, step.after)
    try:
        with explaining("vgpu-type", str(step.device.address)):
            tree.write(directory / facts.DIRECTORY / facts.CURRENT, str(step.after))
    except WriteFailed as error:
        if step.after:
            reader.disclaim(tree, step.device.address)
        offered = {kind.id for kind in facts.creatable_types(tree, directory)}
        if error.errno in (EIO, EINVAL) and str(step.after) in offered:
            with suppress(OSError):  # a full /run must not hide the driver's error
                reader.mark(tree, step.device.address, f"rejected type {step.after}")
            error.hint += (
                "; vfiomgr uses another virtual function next time: vfiomgr vgpu list --types"
            )
        raise


NOT_FOUND = 6
IN_USE = 19

_CAUSES: dict[int, tuple[str, str]] = {
    2: (
        "the driver does not support this profile or placement",
        "list the profiles with: vfiomgr vgpu instances (placements need driver 510 or later)",
    ),
    3: ("not supported by the GPU or its driver", "list supported modes with: vfiomgr vgpu mode"),
    4: ("permission denied", "run as root, outside of a container"),
    NOT_FOUND: (
        "GPU in MIG mode, or GPU instance, not found",
        "check with: vfiomgr vgpu mode; vfiomgr vgpu instances",
    ),
    9: ("NVIDIA's driver is not loaded", "load it: modprobe nvidia"),
    15: ("the GPU fell off the bus", "power-cycle the device or the host"),
    IN_USE: (
        "the instance is in use by a vGPU, a process, or a GPU monitor (DCGM)",
        "stop the vGPUs and processes that vfiomgr vgpu instances shows, and nvidia-dcgm",
    ),
    23: (
        "no capacity beside the existing GPU instances",
        "check with vfiomgr vgpu instances, then run the command again",
    ),
}


def explained(error: ProgramFailed, subject: str) -> HostError:
    """Add cause and remedy to an error of nvidia-smi, if its status is known."""
    cause, remedy = _CAUSES.get(
        error.status or 0, ("", "check the output of nvidia-smi above, and dmesg (NVRM)")
    )
    message = f"{subject}: {cause}: {error.message}" if cause else f"{subject}: {error.message}"
    return HostError(message, remedy)


_Where = tuple[int, int]


@performs(SetGpuInstances)
def set_instances(tree: HostTree, step: SetGpuInstances) -> None:
    """Create and destroy the GPU instances that a step names.

    Raises:
        HostError: nvidia-smi fails, or does not report the new state.
    """
    require_same_device(tree, step.device)
    require_runnable(tree, "nvidia-smi")
    there = _present(tree, step)
    staying = {_where(place) for place in step.after}
    for place in step.gone:
        instance = there.get(_where(place))
        if instance is not None and _where(place) not in staying:
            # Its compute instances first; they may already be removed.
            words = ["-dci", "-dgi"] if instance.compute_instances else ["-dgi"]
            _change(tree, step, instance, *words)
    there = _present(tree, step)
    for place in step.made:
        instance = there.get(_where(place))
        if instance is not None and instance.place.has_compute is not place.has_compute:
            _change(tree, step, instance, "-cci" if place.has_compute else "-dci")
    missing = tuple(place for place in step.made if _where(place) not in there)
    for call in step.creations(missing):
        _call(tree, call, f"{step.device.address}: GPU instances {counted_places(missing)}")
    _verify(tree, step)


def _where(place: InstancePlace | GpuInstance) -> _Where:
    """The identity of an instance; its number changes when it is created again."""
    return place.profile, place.start


def _present(tree: HostTree, step: SetGpuInstances) -> dict[_Where, GpuInstance]:
    return {_where(one): one for one in read_instances(tree, step.device.address)}


def _change(tree: HostTree, step: SetGpuInstances, instance: GpuInstance, *words: str) -> None:
    for word in words:
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
        message = f"cannot set GPU instances of {step.device.address}: nvidia-smi reports "
        message += counted_places(tuple(sorted(there, key=lambda place: place.start)))
        message += f"; missing: {counted_places(missing)}; left over: {counted_places(left)}"
        raise HostError(message, "check dmesg (NVRM), and run: vfiomgr vgpu instances")


_UNKNOWN = "check that NVIDIA's vGPU host driver is loaded: nvidia-smi -q"


@performs(SetHeterogeneous, SetMig, SetPersistence)
def set_mode(tree: HostTree, step: ModeStep, limit: float | None = None) -> None:
    """Set the mode of a GPU that a step names; `limit` are the seconds for nvidia-smi.

    Without a limit, whoever runs the step has a deadline.

    Raises:
        HostError: nvidia-smi fails, or does not report the new mode.
    """
    require_same_device(tree, step.device)
    require_runnable(tree, "nvidia-smi")
    if _current(tree, step) is step.after:
        return
    try:
        tree.call(*step.command(), limit=limit)
    except ProgramFailed as error:
        raise _explained(step, error) from error
    found = _current(tree, step)
    if found is not step.after:
        shown = {True: "Enabled", False: "Disabled", None: "nothing"}[found]
        message = (
            f"cannot set the mode of {step.device.address}: nvidia-smi reports {shown} after "
            f"{step.commands()[0]}"
        )
        raise HostError(message, _why_not(tree, step))


def _current(tree: HostTree, step: ModeStep) -> bool | None:
    address = step.device.address
    if isinstance(step, SetPersistence):
        return read_persistence(tree, address)
    mode = read_mode(tree, address)
    if mode is None:
        return None
    return mode.mig if isinstance(step, SetMig) else mode.heterogeneous


def _explained(step: ModeStep, error: ProgramFailed) -> HostError:
    if error.status == IN_USE:
        message = f"{step.device.address} has an active vGPU or is in use: {error.message}"
        return HostError(message, "remove its vGPUs first; list them with: vfiomgr vgpu list")
    remedy = "check the output of nvidia-smi above, and dmesg (NVRM)"
    if isinstance(step, SetHeterogeneous):
        remedy = "the GPU must have its virtual functions, and MIG must be off; " + remedy
    return HostError(error.message, remedy)


def _why_not(tree: HostTree, step: ModeStep) -> str:
    mode = read_mode(tree, step.device.address) if isinstance(step, SetMig) else None
    if mode is not None and mode.pending_mig is step.after:
        return (
            f"the mode changes with the next GPU reset: stop everything that uses the GPU, then "
            f"nvidia-smi --gpu-reset -i {step.device.address}"
        )
    return _UNKNOWN
