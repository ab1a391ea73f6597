"""udev and its events: the only importer of pyudev."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.model.path import HostPath

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_UDEVD = HostPath("/run/udev/control")


def is_settled(tree: HostTree, node: HostPath) -> bool:
    """Whether a device node has the owner and the mode that it will keep.

    devtmpfs makes a node for root at once; udevd then applies its rules, by which a guest without
    root's rights may open it. True where no udevd runs, and on other hosts than this machine.
    """
    if tree.root != "/" or not tree.exists(_UDEVD):
        return True
    import pyudev  # noqa: PLC0415 - slow to import

    try:
        device = pyudev.Devices.from_device_file(pyudev.Context(), str(node))
    except (pyudev.DeviceNotFoundError, OSError):
        return False
    return bool(device.is_initialized)


def reload_rules(tree: HostTree) -> None:
    """Have udevd read its rules now; nothing where none runs."""
    if tree.root == "/" and tree.exists(_UDEVD):
        tree.call("udevadm", "control", "--reload")
