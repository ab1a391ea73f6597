"""Functions that a domain takes and its guest does not get: `<address type='unassigned'/>`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vfiomgr.planner.preflight.situation import Situation, Taken


def seen(situation: Situation) -> tuple[Taken, ...]:
    """The functions that the guest has."""
    return tuple(taken for taken in situation.functions if not taken.hostdev.is_unassigned)
