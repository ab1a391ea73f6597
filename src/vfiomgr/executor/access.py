"""Who may open the nodes of a function: its group's and its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import HostError
from vfiomgr.model import path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.host_step import SetNodeAccess


def set_node_access(tree: HostTree, step: SetNodeAccess) -> None:
    """Give the nodes that are there to their new owner.

    Raises:
        HostError: a node did not take it.

    """
    for node in _nodes(tree, step):
        if tree.access(node) == step.after:
            continue
        tree.change_access(node, step.after)
        if tree.access(node) not in (step.after, None):
            message = f"{node} belongs to {tree.access(node)}, not to {step.after}, after chown"
            raise HostError(message, "a rule of udev may have given it to somebody else")


def _nodes(tree: HostTree, step: SetNodeAccess) -> Iterator[path.HostPath]:
    """None of them where the function has gone back to the host."""
    cdevs = path.pci_device(step.device.address) / "vfio-dev"
    nodes = [path.VFIO_CDEVS / name for name in tree.children(cdevs)]
    if step.group is not None:
        nodes.append(path.vfio_group_node(step.group))
    return (node for node in nodes if tree.exists(node))
