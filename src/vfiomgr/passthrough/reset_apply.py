"""Reset and power attributes that are pinned during a binding and then restored."""

from __future__ import annotations

from errno import EINVAL
from typing import TYPE_CHECKING

from vfiomgr.engine.registry import performs
from vfiomgr.engine.verified_write import explaining, require_same_device
from vfiomgr.errors import HostError, WriteFailed
from vfiomgr.passthrough.steps import RequireAnswer, ResetFunction, SetResetMethod
from vfiomgr.paths import pci_device
from vfiomgr.pci import facts as pci_facts
from vfiomgr.pci.reset_capabilities import kept_by_reset, read_config, slot_with_power

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.pci.original_state import DriverState


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


def _set_d3cold_allowed(tree: HostTree, address: PciAddress, *, allowed: bool) -> None:
    if pci_facts.read_driver_state(tree, address, with_pins=True).d3cold_allowed is allowed:
        return
    with explaining("d3cold", str(address)):
        tree.write(pci_device(address) / "d3cold_allowed", str(int(allowed)))
    if pci_facts.read_driver_state(tree, address, with_pins=True).d3cold_allowed is not allowed:
        message = f"cannot set d3cold_allowed of {address}: the kernel did not change the value"
        raise HostError(message, "check dmesg")


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


@performs(RequireAnswer)
def require_answer(tree: HostTree, step: RequireAnswer) -> None:
    """Check that the function is on the bus with its registers unchanged."""
    _require_unharmed(tree, step.device.address, step.kept)


def _require_unharmed(tree: HostTree, address: PciAddress, kept: str | None) -> None:
    _require_answer(tree, address)
    if kept not in (None, kept_by_reset(read_config(tree, address))):
        message = f"{address} has a different command register or BARs after the reset"
        raise HostError(message, _ways_back(tree, address))


def _require_answer(tree: HostTree, address: PciAddress) -> None:
    if not pci_facts.answers(tree, address):
        message = f"{address} fell off the bus: its configuration space reads as all ones"
        raise HostError(message, _ways_back(tree, address))


def _ways_back(tree: HostTree, address: PciAddress) -> str:
    """Return the ways to recover a function, the least disruptive first."""
    directory = pci_device(address)
    ways = [f"remove and rescan it: echo 1 > {directory}/remove; echo 1 > /sys/bus/pci/rescan"]
    power = slot_with_power(tree, address)
    if power is not None:
        ways.append(f"power-cycle its slot: echo 0 > {power}; echo 1 > {power}")
    ways.append("power the host off and on (a reboot may not cut the device's power)")
    methods = pci_facts.read_driver_state(tree, address, with_pins=True).reset_method
    used = methods.split()[0] if methods else "this one"
    return f"{'; or '.join(ways)}; then use another --method than {used}"
