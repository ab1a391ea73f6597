"""What a virtual machine monitor is for vfiomgr: it plans a guest, and writes the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from vfiomgr.guests.model import GuestRequest

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

Request_contra = TypeVar("Request_contra", bound=GuestRequest, contravariant=True)
Plan = TypeVar("Plan")


class Backend(Protocol[Request_contra, Plan]):
    """A virtual machine monitor of certain releases.

    `plan` adds what it can or cannot express to `plan_guest` (`vfiomgr/guests/plan.py`), and
    `render` writes the result for it; neither reads the host.
    """

    def plan(self, host: HostSnapshot, request: Request_contra) -> Plan:
        """Plan the guest, or refuse it with all reasons."""
        ...

    def render(self, plan: Plan) -> str:
        """The text that starts or defines the guest."""
        ...
