"""udev: what it has done to the nodes of devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.model.path import HostPath

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_UDEVD = HostPath("/run/udev/control")
_DATABASE = HostPath("/run/udev/data")


def is_settled(tree: HostTree, node: HostPath) -> bool:
    """Whether a device node has the owner and the mode that it will keep.

    devtmpfs makes a node for root at once; udevd then applies its rules, by which a guest without
    root's rights may open it, and writes its record of the node, which libudev looks for too
    (sd_device_get_is_initialized in systemd). True where no udevd runs, and on other hosts than
    this machine.
    """
    if not tree.is_machine or not tree.exists(_UDEVD):
        return True
    number = tree.device_number(node)
    return number is not None and tree.exists(_DATABASE / f"c{number[0]}:{number[1]}")


def reload_rules(tree: HostTree, seconds: float) -> None:
    """Have udevd read its rules now, within some seconds; nothing where none runs."""
    if tree.is_machine and tree.exists(_UDEVD):
        tree.call("udevadm", "control", "--reload", limit=seconds)
