"""Devices given to a domain and taken from it, all or none.

What libvirt did for some of them is taken back where it fails for another: the definition of before
is put back, and what a running guest was given it is asked to release. libvirt itself keeps its
definitions and its guests, and each of its calls does all of its scope or nothing, so no journal of
vfiomgr is written: a command that was cut off is ended by typing it again.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vfiomgr.adapters.libvirt.devices import Removal
from vfiomgr.adapters.libvirt.document import parse
from vfiomgr.adapters.libvirt.read_devices import hostdev_elements, read_hostdevs
from vfiomgr.errors import (
    GuestKeepsDevice,
    LibvirtSilent,
    RollbackIncomplete,
    RolledBack,
    VfiomgrError,
)
from vfiomgr.model.attachment import Scope

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vfiomgr.adapters.libvirt.connection import Connection


_LIVE = Scope(live=True, config=False)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One element of one function or vGPU, and where it goes or comes from."""

    device: str
    """Its address or UUID."""
    element: str
    scope: Scope


def attach_all(
    connection: Connection,
    domain: str,
    exchanges: Sequence[Exchange],
    deadline: float,
    on_done: Callable[[Exchange], None],
) -> None:
    """Give devices to a domain.

    Raises:
        RolledBack: libvirt did not take one; the domain is as it was.
        RollbackIncomplete: nor would the guest release another one again.

    """

    def give(one: Exchange) -> None:
        connection.attach(domain, one.element, one.scope)

    def take_back(one: Exchange) -> None:
        connection.detach(domain, one.element, _LIVE, Removal(one.device, deadline))

    _carry_out(connection, domain, exchanges, _Deed(give, take_back), on_done)


def detach_all(
    connection: Connection,
    domain: str,
    exchanges: Sequence[Exchange],
    deadline: float,
    on_done: Callable[[Exchange], None],
) -> None:
    """Take devices from a domain; a device that the guest keeps ends it, with the request standing.

    Raises:
        GuestKeepsDevice: it has not been released until the deadline.
        RolledBack: libvirt refused one; the domain is as it was.
        RollbackIncomplete: nor did it give another one back.

    """
    elements = _running_elements(connection, domain, exchanges)

    def take(one: Exchange) -> None:
        connection.detach(domain, one.element, one.scope, Removal(one.device, deadline))

    def give_back(one: Exchange) -> None:
        connection.attach(domain, elements[one.device], _LIVE)

    _carry_out(connection, domain, exchanges, _Deed(take, give_back), on_done)


@dataclass(frozen=True, slots=True)
class _Deed:
    """What is done with each, and what undoes it for a running guest."""

    act: Callable[[Exchange], None]
    undo: Callable[[Exchange], None]


def _carry_out(
    connection: Connection,
    domain: str,
    exchanges: Sequence[Exchange],
    deed: _Deed,
    on_done: Callable[[Exchange], None],
) -> None:
    """Do it with all of them, or take back what was done; not what a guest only keeps."""
    before = _definition(connection, domain, exchanges)
    done: list[Exchange] = []
    for exchange in exchanges:
        try:
            deed.act(exchange)
        except GuestKeepsDevice:
            raise
        except (VfiomgrError, KeyboardInterrupt) as error:
            if not done:
                raise _unknown(error, domain, exchange) from None
            undo = [partial(deed.undo, one) for one in reversed(done) if one.scope.live]
            raise _rolled_back(connection, domain, before, undo, error) from error
        done.append(exchange)
        on_done(exchange)


def _definition(connection: Connection, domain: str, exchanges: Sequence[Exchange]) -> bytes | None:
    """What is defined now, where that is going to change."""
    if not any(exchange.scope.config for exchange in exchanges):
        return None
    return connection.domain_xml(domain, secure=True)


def _running_elements(
    connection: Connection, domain: str, exchanges: Sequence[Exchange]
) -> dict[str, str]:
    """The elements of a running guest's devices by their names, whole."""
    if not any(exchange.scope.live for exchange in exchanges):
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
    except VfiomgrError as another:
        left = f"what was done before could not be taken back: {another.message}"
        return RollbackIncomplete(f"{told}; and {left}", another.hint)
    return RolledBack(f"{told}; {domain} is as it was before", hint)


def _unknown(error: BaseException, domain: str, exchange: Exchange) -> BaseException:
    """A call that was given up libvirt may carry out all the same."""
    if not isinstance(error, LibvirtSilent):
        return error
    left = f"whether {domain} has {exchange.device} is not known"
    hint = f"{error.hint}; then vfiomgr libvirt list --domain {shlex.quote(domain)} shows it"
    return RollbackIncomplete(f"{error.message}: {left}", hint)


def _told(error: BaseException) -> tuple[str, str]:
    if isinstance(error, VfiomgrError):
        return error.message, error.hint
    return "it was interrupted", "run the command again"
