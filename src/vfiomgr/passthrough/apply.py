"""Perform steps on functions, and verify the result.

new_id makes a driver bind every free function with the same PCI IDs (new_id_store in
drivers/pci/pci-driver.c), until remove_id. Therefore the IDs are removed immediately, and identical
functions that the driver also bound are unbound again.

Each action reaches the state that its step names from any state of the host. If it is repeated, or
continued after an interruption, it does only what is missing.
"""

from __future__ import annotations

from contextlib import contextmanager
from errno import EEXIST, ENODEV, ENOENT
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr import paths
from vfiomgr.engine.registry import performs, verifies
from vfiomgr.engine.verified_write import explained, explaining, require_same_device
from vfiomgr.errors import HostError, WriteFailed
from vfiomgr.passthrough.apply_reset import set_method
from vfiomgr.passthrough.steps import (
    ChangeDriver,
    DropOriginalState,
    ReleaseDriver,
    SaveOriginalState,
    probe_file,
)
from vfiomgr.pci import drivers
from vfiomgr.pci import facts as pci_facts
from vfiomgr.pci.facts import read_identity
from vfiomgr.pci.model import PciAddress, is_address, is_vfio_driver, pci_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.engine.verified_write import Operation
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.drivers import DriverState
    from vfiomgr.pci.model import DeviceIdentity


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
    return tree.link_name(pci_device(address) / "driver")


def tighten(tree: HostTree, address: PciAddress, target: DriverState) -> None:
    """Forbid D3cold before a driver binds: vfio-pci lets idle functions sleep immediately."""
    if target.d3cold_allowed is False:
        _set_d3cold_allowed(tree, address, allowed=False)


def loosen(tree: HostTree, address: PciAddress, target: DriverState) -> None:
    """Allow D3cold after the driver is unbound, and set the reset method."""
    if target.d3cold_allowed:
        _set_d3cold_allowed(tree, address, allowed=True)
    if target.reset_method is not None:
        set_method(tree, address, target.reset_method)


def _set_d3cold_allowed(tree: HostTree, address: PciAddress, *, allowed: bool) -> None:
    if pci_facts.read_driver_state(tree, address, with_pins=True).d3cold_allowed is allowed:
        return
    with explaining("d3cold", str(address)):
        tree.write(pci_device(address) / "d3cold_allowed", str(int(allowed)))
    if pci_facts.read_driver_state(tree, address, with_pins=True).d3cold_allowed is not allowed:
        message = f"cannot set d3cold_allowed of {address}: the kernel did not change the value"
        raise HostError(message, "check dmesg")


@performs(SaveOriginalState)
def save_record(tree: HostTree, step: SaveOriginalState) -> None:
    """Write the record of a function."""
    drivers.write_origin(tree, step.origin)


@performs(DropOriginalState)
def drop_record(tree: HostTree, step: DropOriginalState) -> None:
    """Remove the record of a function."""
    drivers.remove_origin(tree, step.origin)


@verifies(ChangeDriver)
def require_life(tree: HostTree, step: ChangeDriver) -> None:
    """Check that a function still answers after its change of drivers.

    Raises:
        HostError: its configuration space reads as all ones.

    """
    if not pci_facts.answers(tree, step.device.address):
        address = step.device.address
        message = f"{address} fell off the bus: its configuration space reads as all ones"
        raise HostError(message, "power-cycle the device or the host")


@performs(ChangeDriver)
def change_driver(tree: HostTree, step: ChangeDriver) -> None:
    """Move a function from its current driver to the driver of the target state."""
    device, before, target = step.device, step.before, step.after
    address = device.address
    require_same_device(tree, device)
    tighten(tree, address, target)
    has_override = tree.exists(pci_device(address) / "driver_override")
    current = tree.link_name(pci_device(address) / "driver")
    override = _override_on_the_way(current, target)
    if has_override:
        _set_override(tree, address, override)
    elif before.driver is not None and is_vfio_driver(before.driver):
        withdraw(tree, device, before.driver)
    if current != target.driver:
        if current is not None:
            _unbind(tree, address)
        if target.driver is None:
            pass
        elif has_override:
            _probe(tree, address, replace(target, driver_override=override))
        else:
            bind_by_id(tree, device, target)
    _verify_driver(tree, address, target.driver)
    if has_override and override != target.driver_override:
        _set_override(tree, address, target.driver_override)
    if target.power_control is not None:
        _set_power_control(tree, address, target.power_control)
    loosen(tree, address, target)


def _override_on_the_way(current: str | None, target: DriverState) -> str | None:
    """The driver_override with which the driver of a state can bind.

    An interrupted run may have left a function on one driver with the override of another. No
    driver binds to it then, so this override is written last.
    """
    is_contrary = target.driver_override not in (None, target.driver)
    if is_contrary and target.driver is not None and current != target.driver:
        return target.driver
    return target.driver_override


@performs(ReleaseDriver)
def release_driver(tree: HostTree, step: ReleaseDriver) -> None:
    """Unbind a function from its driver, and make the kernel probe for another driver."""
    address = step.device.address
    require_same_device(tree, step.device)
    if tree.exists(pci_device(address) / "driver_override"):
        _set_override(tree, address, None)
    if tree.link_name(pci_device(address) / "driver") == step.before.driver:
        _unbind(tree, address)
    with explaining("probe", str(address)):
        tree.write(paths.PCI_DRIVERS_PROBE, str(address))
    if tree.link_name(pci_device(address) / "driver") == step.before.driver:
        message = f"{address} is bound to {step.before.driver} again, which claims its PCI IDs"
        raise HostError(
            message, "check vfio-pci.ids= on the kernel command line and in /etc/modprobe.d"
        )


def _set_override(tree: HostTree, address: PciAddress, driver: str | None) -> None:
    if pci_facts.read_driver_state(tree, address).driver_override == driver:
        return
    with explaining("override", str(address)):
        tree.write(pci_device(address) / "driver_override", driver or "")


def _set_power_control(tree: HostTree, address: PciAddress, control: str) -> None:
    if pci_facts.read_driver_state(tree, address).power_control == control:
        return
    with explaining("power", str(address)):
        tree.write(pci_device(address) / "power/control", control)


def _unbind(tree: HostTree, address: PciAddress) -> None:
    with explaining("unbind", str(address)):
        tree.write(pci_device(address) / "driver/unbind", str(address))


def _probe(tree: HostTree, address: PciAddress, target: DriverState) -> None:
    """Bind again through the driver's own `bind`, which reports the error drivers_probe hides."""
    first = probe_file(target)
    operation: Operation = "probe" if first == paths.PCI_DRIVERS_PROBE else "bind"
    with explaining(operation, f"{address} to {target.driver}"):
        tree.write(first, str(address))
    bound = tree.link_name(pci_device(address) / "driver")
    if bound is None and operation == "probe" and target.driver is not None:
        with explaining("bind", f"{address} to {target.driver}"):
            tree.write(paths.PCI_DRIVERS / target.driver / "bind", str(address))


def _verify_driver(tree: HostTree, address: PciAddress, driver: str | None) -> None:
    bound = tree.link_name(pci_device(address) / "driver")
    if bound != driver:
        wanted = driver or "no driver"
        message = f"cannot bind {address} to {wanted}: it is bound to {bound or 'no driver'}"
        raise HostError(message, "check dmesg; another tool or a udev rule may have moved it")
