"""What `bind` pins for the time of a binding: the way of reset, and to stay out of D3cold."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vfiomgr.model.origin import DriverState
from vfiomgr.model.step import ChangeDriver
from vfiomgr.planner.reset import method_objections

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.model.intent import Bind
    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.planner.guards import Objection


def state_of(device: PciDevice) -> DriverState:
    """What a function is like, with all that can be pinned."""
    return DriverState(
        device.driver,
        device.driver_override,
        device.power_control,
        " ".join(device.reset_method) or None,
        device.d3cold_allowed,
    )


def pinned(state: DriverState, device: PciDevice, intent: Bind) -> DriverState:
    """A state with the pins: the way of reset for named functions alone, D3cold for the slot."""
    if intent.reset_method is not None and device.address in intent.addresses:
        state = replace(state, reset_method=intent.reset_method)
    if intent.no_d3cold and device.d3cold_allowed is not None:
        state = replace(state, d3cold_allowed=False)
    return state


def repin(device: PciDevice, intent: Bind) -> ChangeDriver | None:
    """Pin a function that stays on its driver; None where it is as wanted."""
    now = state_of(device)
    target = pinned(now, device, intent)
    return None if target == now else ChangeDriver(device.identity, now, target)


def unpinned(device: PciDevice, intent: Bind) -> str:
    """What to say of a function that is bound already, and has no record to restore its pins."""
    if repin(device, intent) is None:
        return ""
    return f", but not by vfiomgr, so it is not pinned: vfiomgr unbind {device.address} first"


def objections(host: HostSnapshot, named: Sequence[PciDevice], intent: Bind) -> Iterator[Objection]:
    """Named functions that cannot be reset in the way that is asked for."""
    if intent.reset_method is not None:
        for device in named:
            yield from method_objections(host, device, intent.reset_method)
