"""What of a run that was cut off is to be undone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vfiomgr.errors import UnknownDevice
from vfiomgr.model.step import ChangeDriver, ReleaseDriver, RememberOrigin
from vfiomgr.planner import guards

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vfiomgr.model.intent import Allowance
    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.model.step import Step


@dataclass(frozen=True, slots=True)
class Undoing:
    """The numbers of the steps to undo, and why others are not."""

    steps: tuple[int, ...]
    notes: tuple[str, ...]


def plan_undo(
    host: HostSnapshot,
    steps: Sequence[Step],
    begun: Iterable[int],
    allow: frozenset[Allowance],
    *,
    is_of_this_boot: bool,
) -> Undoing:
    """Which of the begun steps to undo on the host as it is.

    A function that is gone, or another one by now, is left alone. After a reboot there is nothing
    to undo but that a function is on a VFIO driver, since a rule of the run put it there.

    Raises:
        Refusal: the kernel has still not returned, or somebody holds what would be moved.

    """
    kept: list[int] = []
    notes: list[str] = []
    moving: list[PciDevice] = []
    for number in begun:
        step = steps[number]
        if not isinstance(step, ChangeDriver | ReleaseDriver | RememberOrigin):
            kept += [number] if is_of_this_boot else []
            continue
        device = _present(host, step)
        if isinstance(device, str):
            notes.append(device)
        elif isinstance(step, RememberOrigin):
            kept.append(number)
        elif is_of_this_boot or _is_where_it_was_put(device, step):
            kept.append(number)
            moving += [device] if device.stuck or device.driver != step.before.driver else []
    guards.refuse_if_any(guards.undoing(host, moving), allow)
    return Undoing(tuple(kept), tuple(dict.fromkeys(notes)))


def _present(
    host: HostSnapshot, step: ChangeDriver | ReleaseDriver | RememberOrigin
) -> PciDevice | str:
    """The function that a step is about, or why there is none to be undone."""
    expected = step.origin.device if isinstance(step, RememberOrigin) else step.device
    try:
        device = host.device(expected.address)
    except UnknownDevice:
        return f"{expected} is gone, and is left out"
    if not device.identity.is_same_as(expected):
        return f"{expected} is {device.identity} by now, and is left alone"
    return device


def _is_where_it_was_put(device: PciDevice, step: ChangeDriver | ReleaseDriver) -> bool:
    return (
        isinstance(step, ChangeDriver) and device.is_on_vfio and device.driver == step.after.driver
    )
