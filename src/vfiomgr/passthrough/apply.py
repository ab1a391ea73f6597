"""Perform steps on functions, and verify the result.

Each action reaches the state that its step names from any state of the host. If it is repeated, or
continued after an interruption, it does only what is missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr import paths
from vfiomgr.engine.registry import performs, verifies
from vfiomgr.engine.verified_write import becomes_true, explaining, require_same_device
from vfiomgr.errors import HostError
from vfiomgr.passthrough.by_id import NODE_DEADLINE, bind_by_id, let_udev_finish, withdraw
from vfiomgr.passthrough.reset_apply import loosen, tighten
from vfiomgr.passthrough.steps import (
    AwaitVfioNode,
    ChangeDriver,
    DropOriginalState,
    ReleaseDriver,
    SaveOriginalState,
    probe_file,
)
from vfiomgr.pci import facts as pci_facts
from vfiomgr.pci import original_state
from vfiomgr.pci.model import is_vfio_driver

if TYPE_CHECKING:
    from vfiomgr.engine.errno_hints import Operation
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.pci.original_state import DriverState


@performs(SaveOriginalState)
def save_record(tree: HostTree, step: SaveOriginalState) -> None:
    """Write the record of a function."""
    original_state.write_origin(tree, step.origin)


@performs(DropOriginalState)
def drop_record(tree: HostTree, step: DropOriginalState) -> None:
    """Remove the record of a function."""
    original_state.remove_origin(tree, step.origin)


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
    has_override = tree.exists(paths.pci_device(address) / "driver_override")
    current = tree.link_name(paths.pci_device(address) / "driver")
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
    if tree.exists(paths.pci_device(address) / "driver_override"):
        _set_override(tree, address, None)
    if tree.link_name(paths.pci_device(address) / "driver") == step.before.driver:
        _unbind(tree, address)
    with explaining("probe", str(address)):
        tree.write(paths.PCI_DRIVERS_PROBE, str(address))
    if tree.link_name(paths.pci_device(address) / "driver") == step.before.driver:
        message = f"{address} is bound to {step.before.driver} again, which claims its PCI IDs"
        raise HostError(
            message, "check vfio-pci.ids= on the kernel command line and in /etc/modprobe.d"
        )


def _set_override(tree: HostTree, address: PciAddress, driver: str | None) -> None:
    if pci_facts.read_driver_state(tree, address).driver_override == driver:
        return
    with explaining("override", str(address)):
        tree.write(paths.pci_device(address) / "driver_override", driver or "")


def _set_power_control(tree: HostTree, address: PciAddress, control: str) -> None:
    if pci_facts.read_driver_state(tree, address).power_control == control:
        return
    with explaining("power", str(address)):
        tree.write(paths.pci_device(address) / "power/control", control)


def _unbind(tree: HostTree, address: PciAddress) -> None:
    with explaining("unbind", str(address)):
        tree.write(paths.pci_device(address) / "driver/unbind", str(address))


def _probe(tree: HostTree, address: PciAddress, target: DriverState) -> None:
    """Bind again through the driver's own `bind`, which reports the error drivers_probe hides."""
    first = probe_file(target)
    operation: Operation = "probe" if first == paths.PCI_DRIVERS_PROBE else "bind"
    with explaining(operation, f"{address} to {target.driver}"):
        tree.write(first, str(address))
    bound = tree.link_name(paths.pci_device(address) / "driver")
    if bound is None and operation == "probe" and target.driver is not None:
        with explaining("bind", f"{address} to {target.driver}"):
            tree.write(paths.PCI_DRIVERS / target.driver / "bind", str(address))


def _verify_driver(tree: HostTree, address: PciAddress, driver: str | None) -> None:
    bound = tree.link_name(paths.pci_device(address) / "driver")
    if bound != driver:
        wanted = driver or "no driver"
        message = f"cannot bind {address} to {wanted}: it is bound to {bound or 'no driver'}"
        raise HostError(message, "check dmesg; another tool or a udev rule may have moved it")


@performs(AwaitVfioNode)
def await_vfio_node(tree: HostTree, step: AwaitVfioNode) -> None:
    """Wait for the device node of a group, or of the function's cdev."""
    group = paths.vfio_group_node(step.group)
    cdevs = paths.pci_device(step.device.address) / "vfio-dev"

    def is_there() -> bool:
        return tree.exists(group) or any(
            tree.exists(paths.VFIO_CDEVS / name) for name in tree.children(cdevs)
        )

    if not becomes_true(is_there, NODE_DEADLINE):
        message = f"{group} did not appear within {NODE_DEADLINE:.0f} seconds"
        raise HostError(message, "check that udevd is running and that /dev is the host's own")
    let_udev_finish(tree, group)
