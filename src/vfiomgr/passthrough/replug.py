"""Remove a function from its bus, and scan the bus for it: the kernel then sets it up again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.engine.verified_write import becomes_true
from vfiomgr.errors import HostError
from vfiomgr.paths import HostPath
from vfiomgr.pci.facts import read_identity
from vfiomgr.pci.model import pci_device

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import DeviceIdentity, PciAddress

_BUSES = HostPath("/sys/class/pci_bus")
"""Each has `rescan` (Documentation/ABI/testing/sysfs-bus-pci)."""
_DEADLINE = 10.0
"""Seconds for a function to leave its bus, or to appear on it."""


def remove_same(tree: HostTree, device: DeviceIdentity) -> None:
    """Remove a function from the bus, if it is still the same device; it may be gone.

    Raises:
        HostError: it is still there, or another device is at its address.

    """
    if _is_there(tree, device):
        _remove(tree, device.address)


def _is_there(tree: HostTree, device: DeviceIdentity) -> bool:
    found = read_identity(tree, device.address, with_serial=device.serial is not None)
    if found is None or found.is_same_as(device):
        return found is not None
    message = f"another device is at this address: {found} instead of {device}"
    raise HostError(message, "check it with vfiomgr show, then run the command again")


def _remove(tree: HostTree, address: PciAddress) -> None:
    """Remove a function; its siblings stay (remove_store in drivers/pci/pci-sysfs.c)."""
    directory = pci_device(address)
    tree.write(directory / "remove", "1")
    if not becomes_true(lambda: not tree.exists(directory), _DEADLINE):
        message = f"cannot remove {address} from the PCI bus: it is still there"
        raise HostError(message, "check dmesg for messages of its driver")


def scan_again(tree: HostTree, address: PciAddress) -> None:
    """Remove a function, and scan its bus; the kernel then offers it to the drivers.

    A scan of all buses would also find what an administrator has removed from another one.

    Raises:
        HostError: it was not removed, did not appear again, or another device did.

    """
    before = read_identity(tree, address)
    _remove(tree, address)
    tree.write(_BUSES / str(address).rpartition(":")[0] / "rescan", "1")
    is_there = becomes_true(lambda: tree.exists(pci_device(address)), _DEADLINE)
    if not is_there or (before is not None and not _is_there(tree, before)):
        message = f"{address} did not appear on the PCI bus after it was removed"
        raise HostError(message, "check dmesg, and power the host off and on")
