"""Reset functions and buses, and check that configuration spaces still answer."""

from __future__ import annotations

from errno import EINVAL
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.engine.registry import performs
from vfiomgr.engine.verified_write import explaining, require_same_device
from vfiomgr.errors import DeviceDamaged, HostError, WriteFailed
from vfiomgr.passthrough.steps import (
    RequireAnswer,
    RequireBusAnswers,
    ResetBus,
    ResetFunction,
    SetResetMethod,
)
from vfiomgr.pci import facts as pci_facts
from vfiomgr.pci.capabilities import kept_by_reset, read_config, slot_with_power
from vfiomgr.pci.model import pci_device

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.host.tree import HostTree
    from vfiomgr.passthrough.steps import BusFunction
    from vfiomgr.pci.model import PciAddress


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
