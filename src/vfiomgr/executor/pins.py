"""Attributes of reset and power that are pinned for the time of a binding, and given back."""

from __future__ import annotations

from errno import EINVAL
from typing import TYPE_CHECKING

from vfiomgr.errors import HostError, WriteFailed
from vfiomgr.executor.writing import explaining
from vfiomgr.host import pci
from vfiomgr.model.path import pci_device

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.origin import DriverState
    from vfiomgr.model.pci import PciAddress


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
    return pci.read_driver_state(tree, address, with_pins=True).reset_method


def _set_d3cold_allowed(tree: HostTree, address: PciAddress, *, allowed: bool) -> None:
    if pci.read_driver_state(tree, address, with_pins=True).d3cold_allowed is allowed:
        return
    with explaining("d3cold", str(address)):
        tree.write(pci_device(address) / "d3cold_allowed", str(int(allowed)))
    if pci.read_driver_state(tree, address, with_pins=True).d3cold_allowed is not allowed:
        message = f"the kernel took the request, but d3cold_allowed of {address} did not change"
        raise HostError(message, "see dmesg")
