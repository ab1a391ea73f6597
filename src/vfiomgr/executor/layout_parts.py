"""Brings a host to a layout part by part: one that fails keeps no other from it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal, VfiomgrError
from vfiomgr.executor.change import apply
from vfiomgr.planner.layout import compare

if TYPE_CHECKING:
    from vfiomgr.executor.change import Work
    from vfiomgr.executor.run import Outcome
    from vfiomgr.model.intent import ApplyLayout

    Result = Outcome | VfiomgrError


def apply_parts(intent: ApplyLayout, work: Work) -> tuple[tuple[str, Result], ...]:
    """Each device that differs, with what came of it; one that is missing has no name."""
    results: dict[str, Result] = {}
    while True:
        compared = compare(work.scan(intent), intent)
        names = dict.fromkeys(part.name for part in compared.parts if part.differences)
        wanted = (name for name in names if not intent.only or name in intent.only)
        left = [name for name in wanted if name not in results]
        if not left:
            break
        for name in left:  # and functions that one of them makes are there the next time
            results[name] = _result(replace(intent, only=(name,)), work)
    missing = (("", Refusal(o.reason, o.remedy)) for o in compared.objections)
    return (*missing, *results.items())


def _result(intent: ApplyLayout, work: Work) -> Result:
    try:
        return apply(intent, work)
    except VfiomgrError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise
        return error
