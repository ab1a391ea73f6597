"""Writing an attribute of a vGPU, and making sure of it."""

from __future__ import annotations

from contextlib import suppress
from errno import EINVAL, EIO
from typing import TYPE_CHECKING

from vfiomgr import paths
from vfiomgr.engine.registry import performs
from vfiomgr.engine.verified_write import becomes_true, explaining, require_same_device
from vfiomgr.errors import HostError, WriteFailed
from vfiomgr.passthrough.by_id import NODE_DEADLINE, let_udev_finish
from vfiomgr.paths import HostPath
from vfiomgr.vgpu.attributes import is_same_text
from vfiomgr.vgpu.facts import marks, mdev, vendor
from vfiomgr.vgpu.steps import CreateMdev, RemoveMdev, SetVgpuAttribute, SetVgpuType

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


@performs(SetVgpuAttribute)
def set_attribute(tree: HostTree, step: SetVgpuAttribute) -> None:
    """Write what is not there already.

    What an attribute reads is its driver's affair: only a number that comes back as another one
    shows that it was not taken.

    Raises:
        HostError: there is no such attribute of the vGPU, or it does not take the text.

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
        message = f"{step.attribute} of vGPU {step.vgpu} is {found} after {wanted} was written"
        raise HostError(message, "see dmesg for the driver's words")


def _target(tree: HostTree, step: SetVgpuAttribute) -> HostPath:
    """The attribute with all links followed: `driver/unbind` is not the vGPU's."""
    directory = tree.resolve(HostPath(step.directory))
    if directory is None:
        message = f"vGPU {step.vgpu} is gone"
        raise HostError(message, "vfiomgr vgpu list shows what is there")
    target = tree.resolve(directory / step.attribute)
    if target is None:
        message = f"vGPU {step.vgpu} has no attribute {step.attribute}"
        raise HostError(message, f"its driver offers none of this name: ls {directory}")
    if not target.startswith(f"{directory}/"):
        message = f"{step.attribute} of vGPU {step.vgpu} leads to {target}, which is not its own"
        raise HostError(message, "leave it out of the definition")
    return target


@performs(CreateMdev)
def create_mdev(tree: HostTree, step: CreateMdev) -> None:
    """Make a mediated device."""
    vgpu = mdev.read_mdev(tree, step.uuid)
    if vgpu is None:
        target = paths.HostPath(step.parent_path) / mdev.TYPES / step.type_id / "create"
        with explaining("mdev-create", f"vGPU {step.uuid} on {step.parent}"):
            tree.write(target, step.uuid)
        vgpu = mdev.read_mdev(tree, step.uuid)
    if vgpu is None or (vgpu.parent, vgpu.type) != (step.parent, step.type_id):
        found = "none" if vgpu is None else f"a {vgpu.type} on {vgpu.parent}"
        message = f"vGPU {step.uuid} should be a {step.type_id} on {step.parent}, there is {found}"
        raise HostError(message, "see dmesg, and vfiomgr vgpu list")
    if vgpu.iommu_group is None:
        return
    node = paths.vfio_group_node(vgpu.iommu_group)
    if not becomes_true(lambda: tree.exists(node), NODE_DEADLINE):
        message = f"{node} did not appear"
        raise HostError(message, "is udevd running, and /dev the host's own?")
    let_udev_finish(tree, node)


@performs(RemoveMdev)
def remove_mdev(tree: HostTree, step: RemoveMdev) -> None:
    """Remove a mediated device."""
    target = paths.MDEV_DEVICES / step.uuid
    vgpu = mdev.read_mdev(tree, step.uuid)
    if vgpu is None or (vgpu.parent, vgpu.type) != (step.parent, step.type_id):
        return  # gone, or somebody else's of the same UUID
    with explaining("mdev-remove", f"vGPU {step.uuid} on {step.parent}"):
        tree.write(target / "remove", "1")
    if not becomes_true(lambda: not tree.exists(target), NODE_DEADLINE):
        message = f"the kernel took the request, but vGPU {step.uuid} is still there"
        raise HostError(message, "see dmesg for the driver's words")


@performs(SetVgpuType)
def set_type(tree: HostTree, step: SetVgpuType) -> None:
    """Write only what changes something: the driver answers a second time with EPERM."""
    require_same_device(tree, step.device)
    directory = paths.pci_device(step.device.address)
    current = vendor.read_current(tree, directory)
    if current is None:
        message = f"{step.device.address} has no {vendor.CURRENT}: its driver left it"
        raise HostError(message, "make the virtual functions anew; see dmesg")
    if int(current) not in (step.before, step.after):
        message = f"{step.device.address} became a vGPU of type {current} meanwhile"
        raise HostError(message, "run the command again; vfiomgr vgpu list shows all")
    if int(current) != step.after:
        _write_type(tree, step)
    found = vendor.read_current(tree, directory)
    if found != str(step.after):
        message = f"{step.device.address} says type {found} after {step.after} was written"
        raise HostError(message, "see dmesg for the driver's words")
    if step.after:
        vendor.unmark(tree, step.device.address)
    else:
        marks.disclaim(tree, step.device.address)


def _write_type(tree: HostTree, step: SetVgpuType) -> None:
    """Write it; a function that rejects what is offered even then is left alone from now on."""
    directory = paths.pci_device(step.device.address)
    if step.after:
        marks.claim(tree, step.device.address, step.after)
    try:
        with explaining("vgpu-type", str(step.device.address)):
            tree.write(directory / vendor.DIRECTORY / vendor.CURRENT, str(step.after))
    except WriteFailed as error:
        if step.after:
            marks.disclaim(tree, step.device.address)
        offered = {kind.id for kind in vendor.creatable_types(tree, directory)}
        if error.errno in (EIO, EINVAL) and str(step.after) in offered:
            with suppress(OSError):  # a full /run must not hide what the driver said
                vendor.mark(tree, step.device.address, f"rejected type {step.after}")
            error.hint += "; vfiomgr takes another virtual function next time: vfiomgr vgpu types"
        raise
