"""Perform the steps that release cards of the desktop and restore it, and verify the result."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.desktop.steps import (
    ASK_DEADLINE,
    CLOSE_DEADLINE,
    MODULE_DEADLINE,
    UNIT_DEADLINE,
    AnnounceCard,
    AwaitClosed,
    EndSession,
    RecordRelease,
    SetConsole,
    SetModules,
    SetUnit,
    systemctl,
)
from vfiomgr.engine.registry import performs
from vfiomgr.engine.verified_write import becomes_true, require_same_device
from vfiomgr.errors import HostError, ProgramFailed
from vfiomgr.listing import listed
from vfiomgr.paths import PCI_DRIVERS_PROBE, HostPath
from vfiomgr.pci.function import Function, parts_of
from vfiomgr.pci.model import pci_device
from vfiomgr.users.desktop import FBCON, modules_above
from vfiomgr.users.processes import read_holders
from vfiomgr.users.released import ServiceUnit, write_released

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_CONSOLES = HostPath("/sys/class/vtconsole")
_MODULES = HostPath("/sys/module")
_SESSIONS = HostPath("/run/systemd/sessions")
_USERS = HostPath("/run/systemd/users")
_SCREEN_DEADLINE = 15.0
"""Seconds for a driver to show a frame buffer; those of GPUs load firmware before."""
_STARTED = frozenset({"active", "reloading"})
"""Not `activating`: systemctl waits for that, and a unit that fails again and again is in it."""
STOPPED = frozenset({"inactive", "failed"})
_MOMENT = 5.0
"""Seconds for logind to forget a session whose last program has ended."""
_MOST = 5
"""Maximum number of processes that are named in one line."""


@performs(RecordRelease)
def record_release(tree: HostTree, step: RecordRelease) -> None:
    """Write or remove the record of a card."""
    if step.after is not None:
        write_released(tree, step.after)
    elif step.before is not None:
        tree.remove(step.before.path)


@performs(SetUnit)
def set_unit(tree: HostTree, step: SetUnit) -> None:
    """Start or stop a unit, and check that systemd reports that state.

    Raises:
        HostError: it did not start or stop, unless that is only a warning.
    """
    unit = step.unit
    if unit.uid is not None and not tree.exists(_USERS / str(unit.uid)):
        return  # no manager of the user runs: nothing to stop, and a login starts it
    try:
        if step.after:
            _start(tree, unit)
        else:
            tree.call(*systemctl("stop", unit), limit=UNIT_DEADLINE)
        state = unit_state(tree, unit)
        if state not in (_STARTED if step.after else STOPPED):
            message = f"cannot {'start' if step.after else 'stop'} {unit}: it is {state}"
            raise HostError(message, f"see: systemctl status {unit.name}")
    except HostError as error:
        if not step.is_tolerant:
            raise
        command = " ".join(systemctl("start", unit))
        warnings.warn(f"{error.message}; to try again: {command}", stacklevel=2)


def _start(tree: HostTree, unit: ServiceUnit) -> None:
    """Start a unit, even if it has failed too often (StartLimitBurst= in systemd.unit(5)).

    A display manager does so while its X server finds no card.
    """
    try:
        tree.call(*systemctl("start", unit), limit=UNIT_DEADLINE)
    except ProgramFailed as error:
        if error.status is None:
            raise
        tree.call(*systemctl("reset-failed", unit), limit=ASK_DEADLINE)
        tree.call(*systemctl("start", unit), limit=UNIT_DEADLINE)


def unit_state(tree: HostTree, unit: ServiceUnit) -> str:
    """The state of a unit as systemd reports it.

    Raises:
        HostError: systemd does not answer.
    """
    answer = tree.ask(systemctl("is-active", unit), ASK_DEADLINE)
    state = "" if answer is None else answer.output.strip()
    if not state:
        message = f"cannot tell the state of {unit}: systemctl is-active does not answer"
        raise HostError(message, f"see: systemctl status {unit.name}")
    return state


@performs(EndSession)
def end_session(tree: HostTree, step: EndSession) -> None:
    """End a session and the programs that it leaves; no session is left to end if it is gone.

    Raises:
        HostError: it did not end.
    """
    place = _SESSIONS / step.session
    for command in step.programs:
        if not tree.exists(place):
            return
        try:
            tree.call(*command, limit=UNIT_DEADLINE)
        except ProgramFailed:
            if not becomes_true(lambda: not tree.exists(place), _MOMENT):
                raise


@performs(AnnounceCard)
def announce_card(tree: HostTree, step: AnnounceCard) -> None:
    """Send the event for the nodes of a card that still exist."""
    require_same_device(tree, step.device)
    function = Function(tree, pci_device(step.device.address))
    for part in parts_of(function, function.link_name("driver")):
        for name in part.children("drm"):
            if name.startswith(("card", "renderD")):
                tree.write(part.directory / "drm" / name / "uevent", step.after)


@performs(AwaitClosed)
def await_closed(tree: HostTree, step: AwaitClosed) -> None:
    """Wait until no process has a node open.

    Raises:
        HostError: a process still has one, or the processes cannot be seen.
    """
    nodes = frozenset(step.nodes)
    if becomes_true(lambda: read_holders(tree, nodes) == (), CLOSE_DEADLINE):
        return
    found = read_holders(tree, nodes)
    if found == ():
        return
    address = step.device.address
    if found is None:
        message = f"cannot see which programs have {address} open"
        raise HostError(message, "run as root of the host")
    names = listed(list(dict.fromkeys(map(str, found))), _MOST)
    message = f"{address} is still in use after {CLOSE_DEADLINE:.0f} seconds by {names}"
    raise HostError(message, step.hint)


@performs(SetConsole)
def set_console(tree: HostTree, step: SetConsole) -> None:
    """Attach or detach the text console, and check it: the write never fails (vt.c).

    Raises:
        HostError: it did not change, unless that is only a warning.
    """
    if step.after:
        becomes_true(lambda: any(_frame_buffer_consoles(tree)), _SCREEN_DEADLINE)
    consoles = list(_frame_buffer_consoles(tree))
    for console in consoles:
        if (tree.read(console / "bind") == "1") is not step.after:
            tree.write(console / "bind", str(int(step.after)))
    left = [c for c in consoles if (tree.read(c / "bind") == "1") is not step.after]
    if consoles and not left:
        return
    if not (consoles or step.after):
        return  # it vanished with the last frame buffer
    verb = "attach" if step.after else "detach"
    why = f"{left[0]}/bind has not changed" if left else "no frame buffer has appeared"
    message = f"cannot {verb} the text console of {step.device.address}: {why}"
    hint = "see dmesg"
    if left:
        hint += ", and check that the kernel has CONFIG_VT_HW_CONSOLE_BINDING"
    if not step.is_tolerant:
        raise HostError(message, hint)
    warnings.warn(f"{message}; {hint}", stacklevel=2)


def _frame_buffer_consoles(tree: HostTree) -> Iterator[HostPath]:
    """The console's driver for frame buffers, by its name: its number changes."""
    for name in tree.children(_CONSOLES):
        if FBCON in (tree.read(_CONSOLES / name / "name") or ""):
            yield _CONSOLES / name


@performs(SetModules)
def set_modules(tree: HostTree, step: SetModules) -> None:
    """Load or unload modules; loading brings the functions back to their driver.

    Raises:
        HostError: a module is in use, or a function has no driver afterwards.
    """
    try:
        for name in step.after:
            tree.load_module(name)
    except HostError as error:
        if not step.is_tolerant:
            raise
        warnings.warn(f"{error.message}; {error.hint}", stacklevel=2)
    for name in modules_above(tree, step.before[0])[::-1] if step.before else ():
        tree.call("rmmod", name, limit=MODULE_DEADLINE)
        if tree.exists(_MODULES / name):
            message = f"cannot unload {name}: it is still loaded"
            raise HostError(message, "see dmesg")
    if not step.after:
        return
    for function in step.functions:
        place = pci_device(function.address) / "driver"
        if tree.link_name(place) is None:
            tree.write(PCI_DRIVERS_PROBE, str(function.address))
        if tree.link_name(place) != step.driver:
            message = f"{function.address} is not on {step.driver} after its module was loaded"
            raise HostError(message, "see dmesg")
