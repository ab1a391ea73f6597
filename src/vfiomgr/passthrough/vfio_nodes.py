"""The device nodes of VFIO after a bind: wait for them, and check a group that came late."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from vfiomgr import paths
from vfiomgr.engine.registry import performs
from vfiomgr.engine.verified_write import becomes_true
from vfiomgr.errors import HostError
from vfiomgr.host import udev
from vfiomgr.passthrough.steps import AwaitVfioNode
from vfiomgr.pci.iommu import HARMLESS_DRIVERS, group_number, read_group
from vfiomgr.pci.model import PciAddress, is_address, is_vfio_driver, pci_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.paths import HostPath


NODE_DEADLINE = 10.0
"""Seconds. devtmpfs creates the node immediately; udev may take longer."""
_QUEUE_DEADLINE = 200.0
"""Seconds for udevd to handle its events; it ends a handler after 180 (event_timeout)."""
_UNSEEN_DEADLINE = 5.0
"""Seconds to wait if udevd cannot be asked, e.g. in a container without udevadm."""


def cdevs(tree: HostTree, device: HostPath) -> list[HostPath]:
    """The nodes of a device itself, as VFIO names them; a kernel may not create them."""
    return [paths.VFIO_CDEVS / name for name in tree.children(device / "vfio-dev")]


def let_udev_finish(tree: HostTree, node: HostPath) -> None:
    """Wait until udevd has set the owner and mode of a node, or warn that it has not.

    The wait ends when udevd's queue is empty; a busy machine may need minutes.
    """
    if not tree.exists(node) or udev.is_settled(tree, node) or not udev.rules_give_access(tree):
        return
    if udev.has_received(tree):
        becomes_true(lambda: udev.is_settled(tree, node) or not udev.is_busy(tree), _QUEUE_DEADLINE)
        is_final = udev.has_record(tree, node) and not udev.is_busy(tree)
    else:
        becomes_true(lambda: udev.is_settled(tree, node), _UNSEEN_DEADLINE)
        is_final = False
    if not is_final and not udev.is_settled(tree, node):
        text = f"udev has not set the owner of {node} yet: {tree.access(node)}"
        warnings.warn(f"{text}; wait for it with: udevadm settle", stacklevel=2)


@performs(AwaitVfioNode)
def await_vfio_node(tree: HostTree, step: AwaitVfioNode) -> None:
    """Wait for the device node of a group, or of the function's cdev.

    Raises:
        HostError: there is none, or a late group cannot be assigned.

    """
    address = step.device.address
    device = pci_device(address)
    number = group_number(tree, device) if step.group is None else step.group
    if number is None:
        message = f"{address} has no IOMMU group after it was bound to its VFIO driver"
        raise HostError(message, "check dmesg; move it to a slot that an IOMMU covers")
    group = paths.vfio_group_node(number)
    if not becomes_true(
        lambda: any(map(tree.exists, (group, *cdevs(tree, device)))), NODE_DEADLINE
    ):
        message = f"{step.node} did not appear within {NODE_DEADLINE:.0f} seconds"
        raise HostError(message, "check that udevd is running and that /dev is the host's own")
    if step.group is None:
        _require_viable(tree, number, address)
    members = paths.IOMMU_GROUPS / str(number) / "devices"
    owned = [node for name in tree.children(members) for node in cdevs(tree, members / name)]
    for node in (group, *owned):
        let_udev_finish(tree, node)


def _require_viable(tree: HostTree, number: int, address: PciAddress) -> None:
    """Refuse a group with members that stay on host drivers, which no plan could see before."""
    staying = ", ".join(_staying(tree, number))
    if staying:
        message = f"IOMMU group {number}, which the kernel assigned to {address}, also holds "
        message += staying
        raise HostError(message, "bind all of it: run the command again with --with-group")


def _staying(tree: HostTree, number: int) -> Iterator[str]:
    """The members of a group that make it not viable, with their drivers."""
    for name in filter(is_address, read_group(tree, number).members):
        member = PciAddress.parse(name)
        driver = tree.link_name(pci_device(member) / "driver")
        if driver is None or driver in HARMLESS_DRIVERS or is_vfio_driver(driver):
            continue
        if not cdevs(tree, pci_device(member)):
            yield f"{name} on {driver}"
