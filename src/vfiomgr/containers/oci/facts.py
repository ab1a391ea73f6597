"""VFIO nodes below /dev with their kernel numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.containers.oci.model import DeviceNode
from vfiomgr.errors import HostError
from vfiomgr.host.owners import ROOT_ONLY, NodeAccess
from vfiomgr.paths import VFIO_CDEVS, VFIO_NODES, HostPath

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_CLASSES = HostPath("/sys/class")
_FOR_ALL = NodeAccess(0, 0, 0o666)
"""The permissions of devtmpfs for /dev/vfio/vfio (vfio_dev in drivers/vfio/container.c)."""


def read_node(tree: HostTree, path: str) -> DeviceNode:
    """A node with its numbers, owner and mode; for a recorded host the numbers of sysfs.

    Raises:
        HostError: there is no such node, or its numbers are unknown.

    """
    node = HostPath(path)
    access = tree.access(node)
    number = tree.device_number(node) or _number_in_sysfs(tree, node)
    if access is None and number is None and not (tree.is_live or tree.is_machine):
        message = f"no device numbers of {path}: neither the node nor /sys/class below {tree.root}"
        raise HostError(message, "run the command on the host itself")
    if access is None and (number is None or tree.is_live):
        message = f"{path} does not exist"
        raise HostError(message, _remedy(node, is_machine=tree.is_machine))
    if number is None:
        message = f"{path} is not a device node here, and sysfs does not have its numbers"
        raise HostError(message, "run the command where /dev is that of the host")
    usual = _FOR_ALL if node == VFIO_NODES / "vfio" else ROOT_ONLY
    return DeviceNode(path, *number, access or usual)


def _number_in_sysfs(tree: HostTree, node: HostPath) -> tuple[int, int] | None:
    """From the attribute `dev` of the node's device: `238:2`."""
    name = {VFIO_NODES: "vfio", VFIO_CDEVS: "vfio-dev"}.get(node.parent, "misc")
    if node.name in ("vfio", "iommu"):
        name = "misc"
    major, _, minor = (tree.read(_CLASSES / name / node.name / "dev") or "").partition(":")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def _remedy(node: HostPath, *, is_machine: bool) -> str:
    if node.name == "vfio":
        return "load the module: modprobe vfio_iommu_type1"
    if node.name == "iommu":
        return "load the module: modprobe iommufd; or use the device's group: --node group"
    if node.parent == VFIO_CDEVS:
        return "use the device's group: --node group"
    cdev = "use --node cdev on a kernel without groups"
    if not is_machine:
        return cdev
    return f"{cdev}; in a container, pass the root of the host with --root"
