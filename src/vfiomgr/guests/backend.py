"""What a virtual machine monitor is for vfiomgr: it plans a guest, and writes the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from vfiomgr.guests.model import GuestPlan, GuestRequest
from vfiomgr.rules.runner import Report, registered

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


GuestCheck = Callable[["HostSnapshot", "GuestRequest", "GuestPlan"], "Report"]
_CHECKS: list[GuestCheck] = []


def checks_guests(check: GuestCheck) -> GuestCheck:
    """Register the check of planned guests."""
    _CHECKS.append(check)
    return check


def check_guest(host: HostSnapshot, request: GuestRequest, plan: GuestPlan) -> Report:
    """What would prevent the start of a planned guest, by the rules of `vfiomgr check domain`."""
    registered()
    (check,) = _CHECKS
    return check(host, request, plan)
