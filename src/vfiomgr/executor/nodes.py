"""The nodes through which guests open devices: that they come, and that udevd is done with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.executor.writing import becomes_true
from vfiomgr.host import uevents

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.path import HostPath

NODE_DEADLINE = 10.0
"""Seconds; devtmpfs makes the node at once, a udev of its own may take a while."""
UDEV_DEADLINE = 5.0
"""Seconds for udevd to apply its rules to a new node."""


def let_udev_finish(tree: HostTree, node: HostPath) -> None:
    """Wait for owner and mode of a node; without them root's guests can still open it."""
    if not tree.exists(node) or uevents.is_settled(tree, node):
        return
    if uevents.rules_give_access(tree):
        becomes_true(lambda: uevents.is_settled(tree, node), UDEV_DEADLINE)
