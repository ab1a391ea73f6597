"""Functions that a domain takes and its guest does not see: unassigned ones, and NVMe disks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vfiomgr.planner.preflight.situation import Situation, Taken


def seen(situation: Situation) -> tuple[Taken, ...]:
    """The functions that the guest sees."""
    return tuple(taken for taken in situation.functions if taken.hostdev.is_seen)
