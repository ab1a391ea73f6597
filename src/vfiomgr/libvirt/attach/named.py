"""Attach and detach devices, given a libvirt connection and names: plan first, then apply."""

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
"""Seconds that a running guest has to release a device."""
State = Literal["done", "kept", "not tried"]


class ScopeOptions(TypedDict, total=False):
    """The part of a domain to change; by default its definition, and the guest if it runs."""

    live: bool
    """The running guest."""
    config: bool
    """The definition, for the next start."""
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
    """Plan to detach devices (addresses, UUIDs) from a domain; the host need not have them.

    Raises:
        Refusal: lists every reason against it.

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
