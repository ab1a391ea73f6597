"""The check of a planned guest, whatever monitor runs it.

The package that has the rules registers the check, so a backend needs no other backend for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vfiomgr.rules.runner import registered

if TYPE_CHECKING:
    from vfiomgr.guests.model import GuestPlan, GuestRequest
    from vfiomgr.rules.report import Report
    from vfiomgr.snapshot.model import HostSnapshot

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
