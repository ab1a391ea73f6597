"""Reset a function, and look whether it is the same after (pci_reset_function)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import HostError, WriteFailed
from vfiomgr.executor.pins import set_method
from vfiomgr.executor.writing import explaining, require_same_device
from vfiomgr.host import pci
from vfiomgr.host.config import read_config, slot_with_power
from vfiomgr.model.path import pci_device
from vfiomgr.model.reset import kept_by_reset

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.pci import PciAddress
    from vfiomgr.model.step import RequireAnswer, ResetFunction, SetResetMethod


def set_reset_method(tree: HostTree, step: SetResetMethod) -> None:
    """Choose the methods that the step names."""
    require_same_device(tree, step.device)
    set_method(tree, step.device.address, step.after)


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


def require_answer(tree: HostTree, step: RequireAnswer) -> None:
    """Make sure that the function is on the bus, and as it was."""
    _require_unharmed(tree, step.device.address, step.kept)


def _require_unharmed(tree: HostTree, address: PciAddress, kept: str | None) -> None:
    _require_answer(tree, address)
    if kept not in (None, kept_by_reset(read_config(tree, address))):
        message = f"{address} came back from its reset with another command register or BARs"
        raise HostError(message, _ways_back(tree, address))


def _require_answer(tree: HostTree, address: PciAddress) -> None:
    if not pci.answers(tree, address):
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
    methods = pci.read_driver_state(tree, address, with_pins=True).reset_method
    used = methods.split()[0] if methods else "this one"
    return f"{'; else '.join(ways)}; then reset it by another --method than {used}"
