"""Attach devices to a domain and detach them: plan first, then apply all or none.

If libvirt fails for one device, the changes for the others are undone: the previous definition is
restored, and the running guest is asked to release what it got. vfiomgr writes no journal here,
because libvirt keeps its own definitions and guests, and each of its calls applies its entire scope
or nothing. Run an interrupted command again to finish it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, Unpack

from vfiomgr.cli.keywords import Keywords, Option
from vfiomgr.documents.xml_text import parse
from vfiomgr.errors import (
    GuestKeepsDevice,
    LibvirtSilent,
    RollbackIncomplete,
    RolledBack,
    VfiomgrError,
    require_known,
)
from vfiomgr.libvirt.attach.claims import Scope
from vfiomgr.libvirt.attach.plan import AttachRequest, plan_attach, plan_detach, usual_scope
from vfiomgr.libvirt.client.domains import Removal
from vfiomgr.libvirt.model import KnownDomain
from vfiomgr.libvirt.xml import render
from vfiomgr.libvirt.xml.elements import hostdev_elements, read_hostdevs
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.libvirt.client.connection import Connection
    from vfiomgr.snapshot.source import HostSource


_LIVE = Scope(live=True, config=False)


class DeviceChange(Value):
    """One element of one function or vGPU, and the scope of the change."""

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
    """Attach devices to a domain.

    Raises:
        RolledBack: libvirt rejected a device; the domain is unchanged.
        RollbackIncomplete: the guest also did not release another device.
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
    """Detach devices from a domain; stop if the guest keeps one, whose request remains pending.

    Raises:
        GuestKeepsDevice: the guest has not released the device by the deadline.
        RolledBack: libvirt rejected a removal; the domain is unchanged.
        RollbackIncomplete: another device could not be attached again either.
    """
    elements = _running_elements(connection, domain, changes)

    def take(one: DeviceChange) -> None:
        connection.detach(domain, one.element, one.scope, Removal(one.device, deadline))

    def give_back(one: DeviceChange) -> None:
        connection.attach(domain, elements[one.device], _LIVE)

    _carry_out(connection, domain, changes, _Operation(take, give_back, gives=False), on_done)


class _Operation(Value):
    """The change to make for each device, and its inverse for a running guest."""

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
    """Apply the operation to all devices; on an error undo it, unless the guest keeps a device."""
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
    """Wait for the interrupted call, and record the change in `done` if it took effect.

    The query to libvirt waits for that call. The result is False if the guest may still release the
    device.

    Raises:
        RollbackIncomplete: libvirt does not answer, or the wait was interrupted again.
    """
    if not one.scope.live:
        return True
    try:
        has_it = connection.has(domain, one.device)
    except (VfiomgrError, KeyboardInterrupt) as error:
        told, hint = _told(error, "interrupted twice")
        others = "".join(f", and {each.device} was not restored" for each in done)
        left = f"{told}: cannot tell whether {domain} has {one.device}{others}"
        shown = f"check with: vfiomgr libvirt list --domain {shlex.quote(domain)}"
        hint = f"{hint}; then {shown}" if isinstance(error, VfiomgrError) else shown
        raise RollbackIncomplete(left, hint) from error
    if has_it == operation.gives:
        done.append(one)
    return operation.gives or not has_it


def _still_asked(outcome: VfiomgrError, domain: str, asked: Sequence[DeviceChange]) -> VfiomgrError:
    """Report a request that the guest may still answer: it cannot be withdrawn."""
    if not asked:
        return outcome
    (one,) = asked
    told = outcome.message if isinstance(outcome, RollbackIncomplete) else "interrupted"
    return RollbackIncomplete(
        f"{told}; {domain} has {one.device}, and may have been asked to release it",
        "the request stays pending until the guest shuts down; if the guest releases the "
        f"device, attach it again: vfiomgr libvirt attach {shlex.quote(domain)} {one.device}",
    )


def _definition(
    connection: Connection, domain: str, changes: Sequence[DeviceChange]
) -> bytes | None:
    """The current definition, if it is going to change."""
    if not any(change.scope.config for change in changes):
        return None
    return connection.domain_xml(domain, secure=True)


def _running_elements(
    connection: Connection, domain: str, changes: Sequence[DeviceChange]
) -> dict[str, str]:
    """The complete elements of a running guest's devices, by device name."""
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
    """Restore the definition and the running guest; return the error to raise."""
    told, hint = _told(error)
    try:
        if before is not None:
            connection.redefine(before)
        for call in undo:
            call()
    except (VfiomgrError, KeyboardInterrupt) as another:
        why, remedy = _told(another, "interrupted again")
        left = f"cannot undo the earlier changes: {why}"
        return RollbackIncomplete(f"{told}; {left}", remedy)
    return RolledBack(f"{told}; {domain} is unchanged", hint)


def _unknown(error: BaseException, domain: str, change: DeviceChange) -> BaseException:
    """Report that libvirt may still carry out a call that timed out."""
    if not isinstance(error, LibvirtSilent):
        return error
    left = f"cannot tell whether {domain} has {change.device}"
    hint = f"{error.hint}; then check with: vfiomgr libvirt list --domain {shlex.quote(domain)}"
    return RollbackIncomplete(f"{error.message}: {left}", hint)


def _told(error: BaseException, interrupted: str = "interrupted") -> tuple[str, str]:
    if isinstance(error, VfiomgrError):
        return error.message, error.hint
    return interrupted, "run the command again"


DEADLINE = 60.0
"""Seconds that a running guest has to release a device."""
State = Literal["done", "kept", "not tried"]


class ScopeOptions(Keywords, total=False):
    """The part of a domain to change; by default its definition, and the guest if it runs."""

    live: Annotated[bool, Option("Change the running guest.")]
    config: Annotated[bool, Option("Change the definition, for the next start.")]
    only: bool
    """Leave the other functions of the slots unchanged."""


class DomainChange(Value):
    """Devices to attach to or detach from a domain."""

    domain: KnownDomain
    verb: Literal["attach", "detach"]
    changes: tuple[DeviceChange, ...]
    already: tuple[str, ...]
    """Devices that are already in the desired state."""
    notes: tuple[str, ...]

    def apply(
        self, connection: Connection, deadline: float | None = None
    ) -> tuple[list[State], GuestKeepsDevice | None]:
        """Apply the changes; return the result of each, and an error if the guest kept a device.

        `deadline` is how many seconds the guest has to release a device; None for 60.

        Raises:
            RolledBack: libvirt rejected a device; the domain is unchanged.
            RollbackIncomplete: another device could not be undone.
        """
        act = attach_all if self.verb == "attach" else detach_all
        done: list[DeviceChange] = []
        kept = None
        try:
            act(connection, self.domain.name, self.changes, deadline or DEADLINE, done.append)
        except GuestKeepsDevice as error:
            kept = error
        left = len(self.changes) - len(done)
        states: list[State] = ["done"] * len(done)
        states += ["kept"] * min(left, 1)
        states += ["not tried"] * max(left - 1, 0)
        return states, kept


def _scope(domain: KnownDomain, options: ScopeOptions) -> Scope:
    live, config = options.get("live", False), options.get("config", False)
    return usual_scope(domain, live=live, config=config)


def attaching(
    connection: Connection,
    host: HostSource,
    domain: str,
    *devices: str,
    managed: bool = False,
    allow_claimed: bool = False,
    **options: Unpack[ScopeOptions],
) -> DomainChange:
    """Plan to attach devices (addresses, UUIDs) to a domain.

    `managed` lets libvirt bind and unbind them; `allow_claimed` also accepts devices that another
    domain has in its definition.

    Raises:
        Refusal: lists every reason against it.
    """
    require_known(options, ScopeOptions)
    known = connection.domain(domain)
    scope = _scope(known, options)
    only = options.get("only", False)
    wanted = AttachRequest(devices, scope, managed, only, allow_claimed=allow_claimed)
    plan = plan_attach(host.scan(with_users=scope.live), connection.hypervisor(), known, wanted)
    changes = tuple(
        DeviceChange(planned.device.name, render.hostdev(planned), item.scope)
        for item in plan.items
        for planned in item.hostdevs()
    )
    return DomainChange(known, "attach", changes, plan.already, plan.notes)


def detaching(
    connection: Connection, domain: str, *devices: str, **options: Unpack[ScopeOptions]
) -> DomainChange:
    """Plan to detach devices (addresses, UUIDs) from a domain; the host need not have them.

    Raises:
        Refusal: lists every reason against it.
    """
    require_known(options, ScopeOptions)
    known = connection.domain(domain)
    scope = _scope(known, options)
    plan = plan_detach(known, devices, scope, only=options.get("only", False))
    changes = tuple(
        DeviceChange(item.hostdev.name, render.hostdev_source(item.hostdev), item.scope)
        for item in plan.items
    )
    return DomainChange(known, "detach", changes, plan.already, plan.notes)
