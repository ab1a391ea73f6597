"""Perform steps on functions, and verify the result.

new_id makes a driver bind every free function with the same PCI IDs (new_id_store in
drivers/pci/pci-driver.c), until remove_id. Therefore the IDs are removed immediately, and identical
functions that the driver also bound are unbound again.

Each action reaches the state that its step names from any state of the host. If it is repeated, or
continued after an interruption, it does only what is missing.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from errno import EEXIST, EINVAL, ENODEV, ENOENT
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr import paths
from vfiomgr.engine.registry import performs, verifies
from vfiomgr.engine.verified_write import becomes_true, explained, explaining, require_same_device
from vfiomgr.errors import DeviceDamaged, HostError, WriteFailed
from vfiomgr.host import udev
from vfiomgr.passthrough.bars import set_sizes
from vfiomgr.passthrough.replug import scan_again
from vfiomgr.passthrough.steps import (
    AwaitVfioNode,
    ChangeDriver,
    DropOriginalState,
    ReleaseDriver,
    RequireAnswer,
    RequireBusAnswers,
    ResetBus,
    ResetFunction,
    SaveOriginalState,
    SetResetMethod,
    probe_file,
)
from vfiomgr.pci import drivers
from vfiomgr.pci import facts as pci_facts
from vfiomgr.pci.capabilities import kept_by_reset, read_config, slot_with_power
from vfiomgr.pci.facts import read_identity
from vfiomgr.pci.iommu import HARMLESS_DRIVERS, group_number, read_group
from vfiomgr.pci.model import DeviceIdentity, PciAddress, is_address, is_vfio_driver, pci_device

if TYPE_CHECKING:
    from vfiomgr.engine.verified_write import Operation
    from vfiomgr.host.tree import HostTree
    from vfiomgr.passthrough.steps import BusFunction
    from vfiomgr.paths import HostPath
    from vfiomgr.pci.drivers import DriverState

NODE_DEADLINE = 10.0
"""Seconds. devtmpfs creates the node immediately; udev may take longer."""
_QUEUE_DEADLINE = 200.0
"""Seconds for udevd to handle its events; it ends a handler after 180 (event_timeout)."""
_PROBES = 2
"""How often a driver is offered a display that returns, before the bus is scanned."""
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
    if current not in (None, target.driver):
        _unbind(tree, address)
    set_sizes(tree, address, target)
    if target.driver in (None, current):
        pass
    elif has_override:
        returns = step.may_scan and not is_vfio_driver(target.driver)
        now = replace(target, driver_override=override)
        (_bring_back if returns else _probe)(tree, address, now)
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


def _bring_back(tree: HostTree, address: PciAddress, target: DriverState) -> None:
    """Bind a display to the driver of the host, which may refuse what a guest left.

    It is tried twice, then the function alone is removed from the bus and scanned again.

    Raises:
        HostError: the driver still refuses it, or it did not appear again.
    """
    causes: list[WriteFailed] = []
    for _ in range(_PROBES):
        try:
            _probe(tree, address, target)
        except WriteFailed as error:
            causes.append(error)
        if _driver(tree, address) is not None:
            return
    scan_again(tree, address)
    if causes and _driver(tree, address) is None:
        raise causes[-1]
    text = f"{target.driver} refused {address} before it was removed from the bus and scanned again"
    warnings.warn(text, stacklevel=2)


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


def set_method(tree: HostTree, address: PciAddress, methods: str) -> None:
    """Write `methods`, e.g. `flr bus`, to reset_method of a function.

    reset_method_store (drivers/pci/pci-sysfs.c) probes each method, and refuses `bus` if the
    function has neighbours, even if its original list contains `bus`. Such a `bus` has no effect,
    so the list is written without it.

    Raises:
        HostError: the kernel stored another list.
    """
    if _methods(tree, address) == methods:
        return
    target = pci_device(address) / "reset_method"
    without_bus = " ".join(name for name in methods.split() if name != "bus")
    with explaining("reset-method", f"{address} to {methods}"):
        try:
            tree.write(target, methods)
        except WriteFailed as error:
            if error.errno != EINVAL or without_bus in ("", methods):
                raise
            tree.write(target, without_bus)
    found = _methods(tree, address)
    if found not in (methods, without_bus):
        message = (
            f"cannot set reset_method of {address} to {methods}: the kernel reports "
            f"{found or 'an empty list'}"
        )
        raise HostError(message, "check dmesg; another program may have changed it")


def _methods(tree: HostTree, address: PciAddress) -> str | None:
    return pci_facts.read_driver_state(tree, address, with_pins=True).reset_method


@performs(SetResetMethod)
def set_reset_method(tree: HostTree, step: SetResetMethod) -> None:
    """Set the reset methods that the step names."""
    require_same_device(tree, step.device)
    set_method(tree, step.device.address, step.after)


@performs(ResetFunction)
def reset_function(tree: HostTree, step: ResetFunction) -> None:
    """Reset a function; check that it answers, and that BARs and command register are restored.

    Raises:
        HostError: the function fell off the bus, or its registers were not restored.
    """
    address = step.device.address
    require_same_device(tree, step.device)
    _require_answer(tree, address)
    kept = step.kept or kept_by_reset(read_config(tree, address))
    try:
        with explaining("reset", str(address)):
            tree.write(pci_device(address) / "reset", "1")
    except WriteFailed:
        _require_unharmed(tree, address, kept)  # damage explains the failure better
        raise
    _require_unharmed(tree, address, kept)


@performs(ResetBus)
def reset_bus(tree: HostTree, step: ResetBus) -> None:
    """Reset the bus below a bridge; the kernel saves and restores all functions on and below it.

    Other functions than those of the step may have come in the meantime: they are not checked.

    Raises:
        HostError: a function fell off the bus, or its registers were not restored.
    """
    require_same_device(tree, step.device)
    for each in step.functions:
        require_same_device(tree, each.device)
        _require_answer(tree, each.device.address)
    functions = [_as_read(tree, each) for each in step.functions]
    try:
        with explaining("bus-reset", f"the bus below {step.device.address}"):
            tree.write(pci_device(step.device.address) / "reset_subordinate", "1")
    except WriteFailed:
        _require_all_unharmed(tree, functions)
        raise
    _require_all_unharmed(tree, functions)


def _as_read(tree: HostTree, function: BusFunction) -> BusFunction:
    """A function with its present registers, if the plan does not have them."""
    kept = function.kept or kept_by_reset(read_config(tree, function.device.address))
    return replace(function, kept=kept)


@performs(RequireBusAnswers)
def require_bus_answers(tree: HostTree, step: RequireBusAnswers) -> None:
    """Check that the functions are on the bus with their registers unchanged."""
    _require_all_unharmed(tree, step.functions)


def _require_all_unharmed(tree: HostTree, functions: Iterable[BusFunction]) -> None:
    for each in functions:
        require_same_device(tree, each.device)
        _require_unharmed(tree, each.device.address, each.kept, with_bus=True)


@performs(RequireAnswer)
def require_answer(tree: HostTree, step: RequireAnswer) -> None:
    """Check that the function is on the bus with its registers unchanged."""
    _require_unharmed(tree, step.device.address, step.kept)


def _require_unharmed(
    tree: HostTree, address: PciAddress, kept: str | None, *, with_bus: bool = False
) -> None:
    _require_answer(tree, address, with_bus=with_bus)
    if kept not in (None, kept_by_reset(read_config(tree, address))):
        message = f"{address} has a different command register or BARs after the reset"
        raise DeviceDamaged(message, _ways_back(tree, address, with_bus=with_bus))


def _require_answer(tree: HostTree, address: PciAddress, *, with_bus: bool = False) -> None:
    if not pci_facts.answers(tree, address):
        message = f"{address} fell off the bus: its configuration space reads as all ones"
        raise DeviceDamaged(message, _ways_back(tree, address, with_bus=with_bus))


def _ways_back(tree: HostTree, address: PciAddress, *, with_bus: bool) -> str:
    """Return the ways to recover a function, the least disruptive first."""
    directory = pci_device(address)
    ways = [f"remove and rescan it: echo 1 > {directory}/remove; echo 1 > /sys/bus/pci/rescan"]
    power = slot_with_power(tree, address)
    if power is not None:
        ways.append(f"power-cycle its slot: echo 0 > {power}; echo 1 > {power}")
    ways.append("power the host off and on (a reboot may not cut the device's power)")
    if with_bus:
        return "; or ".join(ways)
    methods = pci_facts.read_driver_state(tree, address, with_pins=True).reset_method
    used = methods.split()[0] if methods else "this one"
    return f"{'; or '.join(ways)}; then use another --method than {used}"
