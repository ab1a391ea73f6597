"""Which steps of an interrupted operation are undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import refuse, refuse_if_any
from vfiomgr.engine.registry import undo_guards
from vfiomgr.errors import UnknownDevice
from vfiomgr.snapshot.values import Holder
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from vfiomgr.diagnostic import Override
    from vfiomgr.engine.plan import Step  # noqa: TC004
    from vfiomgr.pci.model import DeviceIdentity, PciDevice  # noqa: TC004
    from vfiomgr.snapshot.model import HostSnapshot


class UndoPlan(Value):
    """The numbers of the steps to undo, and why others are not undone."""

    steps: tuple[int, ...]
    notes: tuple[str, ...]


class UndoScope(Value):
    """What undoing affects, for the checks that capabilities register."""

    made: tuple[Holder, ...]
    """vGPUs that undoing removes."""
    leaving: tuple[PciDevice, ...]
    """Functions that leave their driver, or vanish with the number of virtual functions."""
    removed: tuple[PciDevice, ...]
    """Virtual functions among them."""
    reduced: tuple[PciDevice, ...]
    """Virtual functions that lose memory."""
    inverses: tuple[Step, ...]
    """The inverse steps in order."""
    can_add_steps: bool
    """Whether the caller can take other steps besides these inverses."""


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
    moving: list[PciDevice] = []
    begun = tuple(begun)
    made_again = {
        bridge
        for n in begun
        if is_of_this_boot and (bridge := steps[n].recreates_below) is not None
    }
    for number in begun:
        step = steps[number]
        identity = step.tied_to
        if identity is None:
            kept += [number] if is_of_this_boot or step.outlasts_reboot else []
            continue
        device = _present(host, identity)
        if device is None and identity.bridge_path in made_again:
            kept.append(number)
        elif device is None or isinstance(device, str):
            notes.append(device or f"{identity} is gone and is skipped")
        elif step.is_record or is_of_this_boot or step.is_effective_after_reboot(device):
            kept.append(number)
            moving += [device] if step.is_moved_by_undo(device) else []
    _refuse_undo(host, [steps[n] for n in kept], moving, allow, can_add_steps=can_add_steps)
    return UndoPlan(tuple(kept), tuple(dict.fromkeys(notes)))


def _refuse_undo(
    host: HostSnapshot,
    steps: Sequence[Step],
    moving: Iterable[PciDevice],
    allow: frozenset[Override],
    *,
    can_add_steps: bool,
) -> None:
    made = [vgpu for step in steps if (vgpu := step.made_vgpu(host)) is not None]
    removed = {d.address: d for step in steps for d in step.functions_removed_by_undo(host)}
    reduced = {d.address: d for step in steps for d in step.functions_reduced_by_undo(host)}
    leaving = {d.address: d for d in (*moving, *removed.values())}
    scope = UndoScope(
        tuple(made),
        tuple(leaving.values()),
        tuple(removed.values()),
        tuple(reduced.values()),
        tuple(back for step in reversed(steps) if (back := step.inverse()) is not None),
        can_add_steps,
    )
    for guard in undo_guards():
        refuse_if_any(guard(host, scope), allow)


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
