"""Bind through new_id on kernels before 3.16, which have no driver_override.

new_id makes a driver bind every free function with the same PCI IDs (new_id_store in
drivers/pci/pci-driver.c), until remove_id. Therefore the IDs are removed immediately, and identical
functions that the driver also bound are unbound again.
"""

from __future__ import annotations

from contextlib import contextmanager
from errno import EEXIST, ENODEV, ENOENT
from typing import TYPE_CHECKING

from vfiomgr import paths
from vfiomgr.engine.errno_hints import explained
from vfiomgr.engine.verified_write import becomes_true, explaining
from vfiomgr.errors import WriteFailed
from vfiomgr.host import udev
from vfiomgr.pci.facts import read_identity
from vfiomgr.pci.model import PciAddress, is_address, is_vfio_driver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.paths import HostPath
    from vfiomgr.pci.model import DeviceIdentity
    from vfiomgr.pci.original_state import DriverState


def bind_by_id(tree: HostTree, device: DeviceIdentity, target: DriverState) -> None:
    """Bind an unbound function to a driver; a VFIO driver gets the PCI IDs for that moment.

    Raises:
        WriteFailed: with the cause and the remedy.

    """
    driver = target.driver or ""
    if not is_vfio_driver(driver):
        _bind(tree, device, driver)
        return
    free_twins = [twin for twin in _twins(tree, device) if _driver(tree, twin) is None]
    with _lent(tree, device, driver):
        if _driver(tree, device.address) is None:
            _bind(tree, device, driver)
        for twin in free_twins:
            if _driver(tree, twin) == driver:
                tree.write(paths.PCI_DRIVERS / driver / "unbind", str(twin))


def withdraw(tree: HostTree, device: DeviceIdentity, driver: str) -> None:
    """Remove PCI IDs that an interrupted run may have left with a driver."""
    try:
        tree.write(paths.PCI_DRIVERS / driver / "remove_id", _identifiers(device))
    except WriteFailed as error:
        if error.errno not in (ENODEV, ENOENT):
            raise


@contextmanager
def _lent(tree: HostTree, device: DeviceIdentity, driver: str) -> Iterator[None]:
    try:
        tree.write(paths.PCI_DRIVERS / driver / "new_id", _identifiers(device))
    except WriteFailed as error:
        if error.errno != EEXIST:  # the driver lists them itself, or somebody lent them before
            raise explained(error, "new-id", f"{device.address} to {driver}") from error
        yield
        return
    try:
        yield
    finally:
        withdraw(tree, device, driver)


def _bind(tree: HostTree, device: DeviceIdentity, driver: str) -> None:
    with explaining("bind", f"{device.address} to {driver}"):
        tree.write(paths.PCI_DRIVERS / driver / "bind", str(device.address))


def _identifiers(device: DeviceIdentity) -> str:
    """Vendor, device, subsystem vendor and subsystem device: the narrowest match for new_id."""
    return f"{device.vendor_id} {device.device_id} {device.subsystem_id.replace(':', ' ')}"


def _twins(tree: HostTree, device: DeviceIdentity) -> Iterator[PciAddress]:
    """The other functions with the same vendor and device."""
    wanted = (device.vendor_id, device.device_id)
    for name in filter(is_address, tree.children(paths.PCI_DEVICES)):
        address = PciAddress.parse(name)
        found = read_identity(tree, address)
        if found and address != device.address and (found.vendor_id, found.device_id) == wanted:
            yield address


def _driver(tree: HostTree, address: PciAddress) -> str | None:
    return tree.link_name(paths.pci_device(address) / "driver")


NODE_DEADLINE = 10.0
"""Seconds. devtmpfs creates the node immediately; udev may take longer."""
UDEV_DEADLINE = 5.0
"""Seconds for udevd to apply its rules to a new node."""


def let_udev_finish(tree: HostTree, node: HostPath) -> None:
    """Wait for the owner and mode of a node; guests that run as root do not need them."""
    if not tree.exists(node) or udev.is_settled(tree, node):
        return
    if udev.rules_give_access(tree):
        becomes_true(lambda: udev.is_settled(tree, node), UDEV_DEADLINE)
