"""Writing an attribute of a vGPU, and making sure of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import HostError
from vfiomgr.executor.writing import explaining
from vfiomgr.model.definition import is_same_text
from vfiomgr.model.path import HostPath

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.attribute_step import SetVgpuAttribute


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
