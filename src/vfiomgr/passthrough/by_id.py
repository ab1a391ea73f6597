"""Binding without driver_override, which kernels before 3.16 lack: new_id, taken back at once.

new_id makes a driver take every free function with the same identifiers, not the wanted one alone
(new_id_store in drivers/pci/pci-driver.c), and keeps taking them until remove_id. So the
identifiers are lent for one moment, and twins that came along are let go again.
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
    """Give a function without a driver to one; a VFIO driver is lent the identifiers.

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
    """Take identifiers back from a driver, which a run that was cut off may have left with it."""
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
    """Vendor, device, subsystem vendor and device: as narrow as new_id takes them."""
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
"""Seconds; devtmpfs makes the node at once, a udev of its own may take a while."""
UDEV_DEADLINE = 5.0
"""Seconds for udevd to apply its rules to a new node."""


def let_udev_finish(tree: HostTree, node: HostPath) -> None:
    """Wait for owner and mode of a node; without them root's guests can still open it."""
    if not tree.exists(node) or udev.is_settled(tree, node):
        return
    if udev.rules_give_access(tree):
        becomes_true(lambda: udev.is_settled(tree, node), UDEV_DEADLINE)
