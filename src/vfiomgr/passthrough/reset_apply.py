"""Attributes of reset and power that are pinned for the time of a binding, and given back."""

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
    """Forbid D3cold before a driver takes the function: vfio-pci lets it sleep at once."""
    if target.d3cold_allowed is False:
        _set_d3cold_allowed(tree, address, allowed=False)


def loosen(tree: HostTree, address: PciAddress, target: DriverState) -> None:
    """Allow D3cold after a driver let go of the function, and set the rest."""
    if target.d3cold_allowed:
        _set_d3cold_allowed(tree, address, allowed=True)
    if target.reset_method is not None:
        set_method(tree, address, target.reset_method)


def set_method(tree: HostTree, address: PciAddress, methods: str) -> None:
    """Make `methods`, e.g. `flr bus`, what the kernel uses to reset a function.

    reset_method_store (drivers/pci/pci-sysfs.c) tries each method anew, and refuses `bus` where
    the function has neighbours, though the list that was made when it was found, before them,
    holds it. There it would do nothing either, so a list is set without it.

    Raises:
        HostError: the kernel took another list.

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
        message = f"reset_method of {address} is {found or 'empty'}, not {methods}"
        raise HostError(message, "see dmesg; another program may have changed it")


def _methods(tree: HostTree, address: PciAddress) -> str | None:
    return pci_facts.read_driver_state(tree, address, with_pins=True).reset_method


def _set_d3cold_allowed(tree: HostTree, address: PciAddress, *, allowed: bool) -> None:
    if pci_facts.read_driver_state(tree, address, with_pins=True).d3cold_allowed is allowed:
        return
    with explaining("d3cold", str(address)):
        tree.write(pci_device(address) / "d3cold_allowed", str(int(allowed)))
    if pci_facts.read_driver_state(tree, address, with_pins=True).d3cold_allowed is not allowed:
        message = f"the kernel took the request, but d3cold_allowed of {address} did not change"
        raise HostError(message, "see dmesg")


@performs(SetResetMethod)
def set_reset_method(tree: HostTree, step: SetResetMethod) -> None:
    """Choose the methods that the step names."""
    require_same_device(tree, step.device)
    set_method(tree, step.device.address, step.after)


@performs(ResetFunction)
def reset_function(tree: HostTree, step: ResetFunction) -> None:
    """Reset; the function must answer before and after, and have its BARs and command register.

    Raises:
        HostError: it fell off the bus, or came back without what the kernel restores.

    """
    address = step.device.address
    require_same_device(tree, step.device)
    _require_answer(tree, address)
    kept = step.kept or kept_by_reset(read_config(tree, address))
    try:
        with explaining("reset", str(address)):
            tree.write(pci_device(address) / "reset", "1")
    except WriteFailed:
        _require_unharmed(tree, address, kept)  # harm is the better explanation
        raise
    _require_unharmed(tree, address, kept)


@performs(RequireAnswer)
def require_answer(tree: HostTree, step: RequireAnswer) -> None:
    """Make sure that the function is on the bus, and as it was."""
    _require_unharmed(tree, step.device.address, step.kept)


def _require_unharmed(tree: HostTree, address: PciAddress, kept: str | None) -> None:
    _require_answer(tree, address)
    if kept not in (None, kept_by_reset(read_config(tree, address))):
        message = f"{address} came back from its reset with another command register or BARs"
        raise HostError(message, _ways_back(tree, address))


def _require_answer(tree: HostTree, address: PciAddress) -> None:
    if not pci_facts.answers(tree, address):
        message = f"{address} fell off the bus: its configuration space reads as all ones"
        raise HostError(message, _ways_back(tree, address))


def _ways_back(tree: HostTree, address: PciAddress) -> str:
    """What may revive a function, the mildest first."""
    directory = pci_device(address)
    ways = [f"remove it and look again: echo 1 > {directory}/remove; echo 1 > /sys/bus/pci/rescan"]
    power = slot_with_power(tree, address)
    if power is not None:
        ways.append(f"power-cycle its slot: echo 0 > {power}; echo 1 > {power}")
    ways.append("power the host off and on, for a reboot may not cut the device's power")
    methods = pci_facts.read_driver_state(tree, address, with_pins=True).reset_method
    used = methods.split()[0] if methods else "this one"
    return f"{'; else '.join(ways)}; then reset it by another --method than {used}"
