"""Devices given to a domain of a libvirt and taken from it: planned, then carried out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from vfiomgr.errors import GuestKeepsDevice
from vfiomgr.libvirt.attach.apply import DeviceChange, attach_all, detach_all
from vfiomgr.libvirt.attach.plan import AttachRequest, plan_attach, plan_detach, usual_scope
from vfiomgr.libvirt.model import KnownDomain
from vfiomgr.libvirt.xml import render
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.libvirt.client.connection import Connection
    from vfiomgr.snapshot.source import HostSource

DEADLINE = 60.0
"""Seconds in which a running guest releases a device."""
State = Literal["done", "kept", "not tried"]


class ScopeOptions(TypedDict, total=False):
    """What of a domain is changed; without any, its definition, and the guest where it runs."""

    live: bool
    """The running guest."""
    config: bool
    """The definition, for the next start."""
    only: bool
    """Leave the other functions of the slots as they are."""


class DomainChange(Value):
    """Devices that a domain is given, or gives back."""

    domain: KnownDomain
    verb: Literal["attach", "detach"]
    changes: tuple[DeviceChange, ...]
    already: tuple[str, ...]
    """What is so already."""
    notes: tuple[str, ...]

    def apply(
        self, connection: Connection, deadline: float | None = None
    ) -> tuple[list[State], GuestKeepsDevice | None]:
        """What became of each change, and the error where the guest kept a device.

        `deadline` is how many seconds the guest has to release one; None for 60.

        Raises:
            RolledBack: libvirt refused one; the domain is as it was.
            RollbackIncomplete: and another one could not be undone.

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


def attaching(
    connection: Connection,
    host: HostSource,
    domain: str,
    *devices: str,
    managed: bool = False,
    allow_claimed: bool = False,
    **options: Unpack[ScopeOptions],
) -> DomainChange:
    """The change that gives devices (addresses, UUIDs) to a domain.

    `managed` lets libvirt bind and unbind them; `allow_claimed` takes also what the definition of
    another domain has.

    Raises:
        Refusal: with everything that forbids it.

    """
    known = connection.domain(domain)
    live, config = options.get("live", False), options.get("config", False)
    scope = usual_scope(known, live=live, config=config)
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
    """The change that takes devices (addresses, UUIDs) from a domain; the host may lack them.

    Raises:
        Refusal: with everything that forbids it.

    """
    known = connection.domain(domain)
    live, config = options.get("live", False), options.get("config", False)
    scope = usual_scope(known, live=live, config=config)
    plan = plan_detach(known, devices, scope, only=options.get("only", False))
    changes = tuple(
        DeviceChange(item.hostdev.name, render.hostdev_source(item.hostdev), item.scope)
        for item in plan.items
    )
    return DomainChange(known, "detach", changes, plan.already, plan.notes)
