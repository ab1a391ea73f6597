"""Perform steps on vGPUs, and verify the result."""

from __future__ import annotations

from contextlib import suppress
from errno import EINVAL, EIO
from typing import TYPE_CHECKING

from vfiomgr import paths
from vfiomgr.engine.registry import performs
from vfiomgr.engine.verified_write import becomes_true, explaining, require_same_device
from vfiomgr.errors import HostError, WriteFailed
from vfiomgr.passthrough.apply import NODE_DEADLINE, let_udev_finish
from vfiomgr.paths import HostPath
from vfiomgr.vgpu import facts
from vfiomgr.vgpu.model import is_same_text
from vfiomgr.vgpu.steps import CreateMdev, RemoveMdev, SetVgpuAttribute, SetVgpuType

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
    if vgpu.iommu_group is None:
        return
    node = paths.vfio_group_node(vgpu.iommu_group)
    if not becomes_true(lambda: tree.exists(node), NODE_DEADLINE):
        message = f"{node} did not appear"
        raise HostError(message, "check that udevd is running and that /dev is the host's own")
    let_udev_finish(tree, node)


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
    directory = paths.pci_device(step.device.address)
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
        facts.unmark(tree, step.device.address)
    else:
        facts.disclaim(tree, step.device.address)


def _write_type(tree: HostTree, step: SetVgpuType) -> None:
    """Write the type; mark a function that rejects a type which its driver offers."""
    directory = paths.pci_device(step.device.address)
    if step.after:
        facts.claim(tree, step.device.address, step.after)
    try:
        with explaining("vgpu-type", str(step.device.address)):
            tree.write(directory / facts.DIRECTORY / facts.CURRENT, str(step.after))
    except WriteFailed as error:
        if step.after:
            facts.disclaim(tree, step.device.address)
        offered = {kind.id for kind in facts.creatable_types(tree, directory)}
        if error.errno in (EIO, EINVAL) and str(step.after) in offered:
            with suppress(OSError):  # a full /run must not hide the driver's error
                facts.mark(tree, step.device.address, f"rejected type {step.after}")
            error.hint += (
                "; vfiomgr uses another virtual function next time: vfiomgr vgpu list --types"
            )
        raise
