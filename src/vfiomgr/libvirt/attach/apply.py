"""Devices given to a domain and taken from it, all or none.

What libvirt did for some of them is taken back where it fails for another: the definition of before
is put back, and what a running guest was given it is asked to release. libvirt itself keeps its
definitions and its guests, and each of its calls does all of its scope or nothing, so no journal of
vfiomgr is written: a command that was cut off is ended by typing it again.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from vfiomgr.documents.xml_text import parse
from vfiomgr.errors import (
    GuestKeepsDevice,
    LibvirtSilent,
    RollbackIncomplete,
    RolledBack,
    VfiomgrError,
)
from vfiomgr.libvirt.attach.claims import Scope
from vfiomgr.libvirt.client.connection import Removal
from vfiomgr.libvirt.xml.read_devices import hostdev_elements, read_hostdevs
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vfiomgr.libvirt.client.connection import Connection


_LIVE = Scope(live=True, config=False)


class DeviceChange(Value):
    """One element of one function or vGPU, and where it goes or comes from."""

    device: str
    """Its address or UUID."""
    element: str
    scope: Scope


def attach_all(
    connection: Connection,
    domain: str,
    changes: Sequence[DeviceChange],
    deadline: float,
    on_done: Callable[[DeviceChange], None],
) -> None:
    """Give devices to a domain.

    Raises:
        RolledBack: libvirt did not take one; the domain is as it was.
        RollbackIncomplete: nor would the guest release another one again.

    """

    def give(one: DeviceChange) -> None:
        connection.attach(domain, one.element, one.scope)

    def take_back(one: DeviceChange) -> None:
        connection.detach(domain, one.element, _LIVE, Removal(one.device, deadline))

    _carry_out(connection, domain, changes, _Operation(give, take_back, gives=True), on_done)


def detach_all(
    connection: Connection,
    domain: str,
    changes: Sequence[DeviceChange],
    deadline: float,
    on_done: Callable[[DeviceChange], None],
) -> None:
    """Take devices from a domain; a device that the guest keeps ends it, with the request standing.

    Raises:
        GuestKeepsDevice: it has not been released until the deadline.
        RolledBack: libvirt refused one; the domain is as it was.
        RollbackIncomplete: nor did it give another one back.

    """
    elements = _running_elements(connection, domain, changes)

    def take(one: DeviceChange) -> None:
        connection.detach(domain, one.element, one.scope, Removal(one.device, deadline))

    def give_back(one: DeviceChange) -> None:
        connection.attach(domain, elements[one.device], _LIVE)

    _carry_out(connection, domain, changes, _Operation(take, give_back, gives=False), on_done)


class _Operation(Value):
    """What is done with each, and what undoes it for a running guest."""

    act: Callable[[DeviceChange], None]
    undo: Callable[[DeviceChange], None]
    gives: bool
    """Whether a running guest has the device afterwards."""


def _carry_out(
    connection: Connection,
    domain: str,
    changes: Sequence[DeviceChange],
    operation: _Operation,
    on_done: Callable[[DeviceChange], None],
) -> None:
    """Do it with all of them, or take back what was done; not what a guest only keeps."""
    before = _definition(connection, domain, changes)
    done: list[DeviceChange] = []
    try:
        for change in changes:
            operation.act(change)
            done.append(change)
            on_done(change)
    except GuestKeepsDevice:
        raise
    except (VfiomgrError, KeyboardInterrupt) as error:
        current = changes[len(done) : len(done) + 1]
        if isinstance(error, KeyboardInterrupt):
            asked = [
                one for one in current if not _is_settled(connection, domain, one, operation, done)
            ]
        elif not done:
            raise _unknown(error, domain, current[0]) from None
        else:
            asked = []
        undo = [partial(operation.undo, one) for one in reversed(done) if one.scope.live]
        outcome = _rolled_back(connection, domain, before, undo, error)
        raise _still_asked(outcome, domain, asked) from error


def _is_settled(
    connection: Connection,
    domain: str,
    one: DeviceChange,
    operation: _Operation,
    done: list[DeviceChange],
) -> bool:
    """Wait out the call that an interrupt has left, and add to what is done where it did its work.

    What is asked of libvirt waits for it. False where a guest may yet release what it has.

    Raises:
        RollbackIncomplete: libvirt does not tell, or it was interrupted again.

    """
    if not one.scope.live:
        return True
    try:
        has_it = connection.has(domain, one.device)
    except (VfiomgrError, KeyboardInterrupt) as error:
        told, hint = _told(error, "it was interrupted twice")
        others = "".join(f", and {each.device} was not taken back" for each in done)
        left = f"{told}: whether {domain} has {one.device} is not known{others}"
        shown = f"vfiomgr libvirt list --domain {shlex.quote(domain)} shows it"
        hint = f"{hint}; then {shown}" if isinstance(error, VfiomgrError) else shown
        raise RollbackIncomplete(left, hint) from error
    if has_it == operation.gives:
        done.append(one)
    return operation.gives or not has_it


def _still_asked(outcome: VfiomgrError, domain: str, asked: Sequence[DeviceChange]) -> VfiomgrError:
    """No request to a guest can be withdrawn."""
    if not asked:
        return outcome
    (one,) = asked
    told = outcome.message if isinstance(outcome, RollbackIncomplete) else "it was interrupted"
    return RollbackIncomplete(
        f"{told}; {domain} has {one.device}, and may have been asked to release it",
        "the request stands until the guest is shut down: where it is released after all, "
        f"vfiomgr libvirt attach {shlex.quote(domain)} {one.device} gives it again",
    )


def _definition(
    connection: Connection, domain: str, changes: Sequence[DeviceChange]
) -> bytes | None:
    """What is defined now, where that is going to change."""
    if not any(change.scope.config for change in changes):
        return None
    return connection.domain_xml(domain, secure=True)


def _running_elements(
    connection: Connection, domain: str, changes: Sequence[DeviceChange]
) -> dict[str, str]:
    """The elements of a running guest's devices by their names, whole."""
    if not any(change.scope.live for change in changes):
        return {}
    text = connection.domain_xml(domain, inactive=False)
    root = parse(text, domain)
    pairs = zip(read_hostdevs(root), hostdev_elements(root), strict=True)
    return {
        hostdev.name: text[element.start.start : element.end.stop].decode()
        for hostdev, element in pairs
    }


def _rolled_back(
    connection: Connection,
    domain: str,
    before: bytes | None,
    undo: Iterable[Callable[[], None]],
    error: BaseException,
) -> VfiomgrError:
    """Put the definition back, and undo what the running guest was given or gave; what to tell."""
    told, hint = _told(error)
    try:
        if before is not None:
            connection.redefine(before)
        for call in undo:
            call()
    except (VfiomgrError, KeyboardInterrupt) as another:
        why, remedy = _told(another, "it was interrupted again")
        left = f"what was done before could not be taken back: {why}"
        return RollbackIncomplete(f"{told}; and {left}", remedy)
    return RolledBack(f"{told}; {domain} is as it was before", hint)


def _unknown(error: BaseException, domain: str, change: DeviceChange) -> BaseException:
    """A call that was given up libvirt may carry out all the same."""
    if not isinstance(error, LibvirtSilent):
        return error
    left = f"whether {domain} has {change.device} is not known"
    hint = f"{error.hint}; then vfiomgr libvirt list --domain {shlex.quote(domain)} shows it"
    return RollbackIncomplete(f"{error.message}: {left}", hint)


def _told(error: BaseException, interrupted: str = "it was interrupted") -> tuple[str, str]:
    if isinstance(error, VfiomgrError):
        return error.message, error.hint
    return interrupted, "run the command again"
