"""Making and removing vGPUs, and making sure of it."""

from __future__ import annotations

from contextlib import suppress
from errno import EINVAL, EIO
from typing import TYPE_CHECKING

from vfiomgr.errors import HostError, WriteFailed
from vfiomgr.executor.nodes import NODE_DEADLINE, let_udev_finish
from vfiomgr.executor.writing import becomes_true, explaining, require_same_device
from vfiomgr.host import mdev, vendor_vgpu, vgpu_marks, wedged
from vfiomgr.model import path
from vfiomgr.model.vgpu_step import CreateMdev, RemoveMdev, SetVgpuType

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


def perform(tree: HostTree, step: CreateMdev | RemoveMdev | SetVgpuType) -> None:
    """Carry out one step and verify its effect.

    Raises:
        HostError: the vGPU is not as the step names it.

    """
    match step:
        case CreateMdev():
            _create_mdev(tree, step)
        case RemoveMdev():
            _remove_mdev(tree, step)
        case SetVgpuType():
            _set_type(tree, step)


def _create_mdev(tree: HostTree, step: CreateMdev) -> None:
    vgpu = mdev.read_mdev(tree, step.uuid)
    if vgpu is None:
        target = path.HostPath(step.parent_path) / mdev.TYPES / step.type_id / "create"
        with explaining("mdev-create", f"vGPU {step.uuid} on {step.parent}"):
            tree.write(target, step.uuid)
        vgpu = mdev.read_mdev(tree, step.uuid)
    if vgpu is None or (vgpu.parent, vgpu.type) != (step.parent, step.type_id):
        found = "none" if vgpu is None else f"a {vgpu.type} on {vgpu.parent}"
        message = f"vGPU {step.uuid} should be a {step.type_id} on {step.parent}, there is {found}"
        raise HostError(message, "see dmesg, and vfiomgr vgpu list")
    if vgpu.iommu_group is None:
        return
    node = path.vfio_group_node(vgpu.iommu_group)
    if not becomes_true(lambda: tree.exists(node), NODE_DEADLINE):
        message = f"{node} did not appear"
        raise HostError(message, "is udevd running, and /dev the host's own?")
    let_udev_finish(tree, node)


def _remove_mdev(tree: HostTree, step: RemoveMdev) -> None:
    target = path.MDEV_DEVICES / step.uuid
    vgpu = mdev.read_mdev(tree, step.uuid)
    if vgpu is None or (vgpu.parent, vgpu.type) != (step.parent, step.type_id):
        return  # gone, or somebody else's of the same UUID
    with explaining("mdev-remove", f"vGPU {step.uuid} on {step.parent}"):
        tree.write(target / "remove", "1")
    if not becomes_true(lambda: not tree.exists(target), NODE_DEADLINE):
        message = f"the kernel took the request, but vGPU {step.uuid} is still there"
        raise HostError(message, "see dmesg for the driver's words")


def _set_type(tree: HostTree, step: SetVgpuType) -> None:
    """Write only what changes something: the driver answers a second time with EPERM."""
    require_same_device(tree, step.device)
    directory = path.pci_device(step.device.address)
    current = vendor_vgpu.read_current(tree, directory)
    if current is None:
        message = f"{step.device.address} has no {vendor_vgpu.CURRENT}: its driver left it"
        raise HostError(message, "make the virtual functions anew; see dmesg")
    if int(current) not in (step.before, step.after):
        message = f"{step.device.address} became a vGPU of type {current} meanwhile"
        raise HostError(message, "run the command again; vfiomgr vgpu list shows all")
    if int(current) != step.after:
        _write_type(tree, step)
    found = vendor_vgpu.read_current(tree, directory)
    if found != str(step.after):
        message = f"{step.device.address} says type {found} after {step.after} was written"
        raise HostError(message, "see dmesg for the driver's words")
    if step.after:
        wedged.unmark(tree, step.device.address)
    else:
        vgpu_marks.disclaim(tree, step.device.address)


def _write_type(tree: HostTree, step: SetVgpuType) -> None:
    """Write it; a function that rejects what is offered even then is left alone from now on."""
    directory = path.pci_device(step.device.address)
    if step.after:
        vgpu_marks.claim(tree, step.device.address, step.after)
    try:
        with explaining("vgpu-type", str(step.device.address)):
            tree.write(directory / vendor_vgpu.DIRECTORY / vendor_vgpu.CURRENT, str(step.after))
    except WriteFailed as error:
        if step.after:
            vgpu_marks.disclaim(tree, step.device.address)
        offered = {kind.id for kind in vendor_vgpu.creatable_types(tree, directory)}
        if error.errno in (EIO, EINVAL) and str(step.after) in offered:
            with suppress(OSError):  # a full /run must not hide what the driver said
                wedged.mark(tree, step.device.address, f"rejected type {step.after}")
            error.hint += "; vfiomgr takes another virtual function next time: vfiomgr vgpu types"
        raise
