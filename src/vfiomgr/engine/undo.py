"""Which steps of an interrupted operation are undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import refuse, refuse_if_any
from vfiomgr.engine.plan import UndoScope
from vfiomgr.engine.registry import undo_effects, undo_guards
from vfiomgr.errors import UnknownDevice
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.diagnostic import Override
    from vfiomgr.engine.plan import Step
    from vfiomgr.pci.model import DeviceIdentity, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.values import Holder


class UndoPlan(Value):
    """The numbers of the steps to undo, and why others are not undone."""

    steps: tuple[int, ...]
    notes: tuple[str, ...]


def plan_undo(  # noqa: PLR0913 - two of them are told apart by name
    host: HostSnapshot,
    steps: Sequence[Step],
    begun: Iterable[int],
    allow: frozenset[Override],
    *,
    is_of_this_boot: bool,
    can_add_steps: bool = False,
) -> UndoPlan:
    """Which of the begun steps to undo on the host as it is.

    A function that is gone or was replaced is left alone, except for a virtual function that
    undoing recreates. After a reboot, only steps whose effect outlasts it are undone, and bindings
    to a VFIO driver by a rule of the run.

    Raises:
        Refusal: the kernel has not returned yet, or a device to be moved is in use.

    """
    kept: list[int] = []
    notes: list[str] = []
    effects = {number: undo_effects(host, steps[number]) for number in begun}
    recreated = {one.recreated_below for one in effects.values() if is_of_this_boot} - {None}
    for number, one in effects.items():
        step = steps[number]
        identity = step.tied_to
        if identity is None:
            kept += [number] if is_of_this_boot or step.outlasts_reboot else []
            continue
        device = _present(host, identity)
        if device is None and identity.bridge_path in recreated:
            kept.append(number)
        elif device is None or isinstance(device, str):
            notes.append(device or f"{identity} is gone and is skipped")
        elif step.is_record or is_of_this_boot or one.outlasts_reboot:
            kept.append(number)
    inverses = (steps[number].inverse() for number in reversed(kept))
    scope = UndoScope(
        _distinct(holder for number in kept for holder in effects[number].leaving),
        _distinct(holder for number in kept for holder in effects[number].removed),
        _distinct(holder for number in kept for holder in effects[number].reduced),
        tuple(step for step in inverses if step is not None),
        can_add_steps,
    )
    for guard in undo_guards():
        refuse_if_any(guard(host, scope), allow)
    return UndoPlan(tuple(kept), tuple(dict.fromkeys(notes)))


def _distinct(holders: Iterable[Holder]) -> tuple[Holder, ...]:
    return tuple(dict.fromkeys(holders))


def refuse_other_devices(host: HostSnapshot, steps: Iterable[Step]) -> None:
    """Require that the functions of a run are still the devices that it was planned for.

    Raises:
        Refusal: another device is at an address; both are named.

    """
    for device, found in other_devices(host, steps):
        remedy = "to close the run without touching it: vfiomgr recover --undo"
        refuse("another-device", device, found, remedy)


def other_devices(
    host: HostSnapshot, steps: Iterable[Step]
) -> Iterator[tuple[DeviceIdentity, str]]:
    """The replaced functions of a run, each with a text that names both devices."""
    for expected in (step.tied_to for step in steps):
        found = None if expected is None else _present(host, expected)
        if expected is not None and isinstance(found, str):
            yield expected, found


def refuse_other_steps(steps: Sequence[Step], reviewed: Sequence[Step]) -> None:
    """Require that a plan is the one that a person has reviewed.

    Raises:
        Refusal: the host has changed in something that it concerns.

    """
    now = [step for step in steps if not step.is_harmless]
    then = [step for step in reviewed if not step.is_harmless]
    if now == then:
        return
    changed = [step for step in now if step not in then]
    changed += [step for step in then if step not in now]
    names = dict.fromkeys(step.subject or step.describe() for step in changed)
    message = f"the host has changed since the plan was made: {', '.join(names) or 'the order'}"
    refuse(
        "plan-outdated",
        ", ".join(names),
        message,
        "make and review a new plan: vfiomgr plan FILE --output PLAN",
    )


def _present(host: HostSnapshot, expected: DeviceIdentity) -> PciDevice | str | None:
    """The device that is expected; None if it is gone, a text if it was replaced."""
    try:
        device = host.device(expected.address)
    except UnknownDevice:
        return None
    if not device.identity.is_same_as(expected):
        return f"{expected} is now {device.identity} and is left alone"
    return device
