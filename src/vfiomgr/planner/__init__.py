"""From a snapshot and an intent to a plan, or a refusal; pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vfiomgr.planner.intents import plan, settled

__all__ = ["plan", "settled"]


def __getattr__(name: str) -> object:
    """`plan` and `settled`, with all planners there are, where somebody wants one of them."""
    if name not in __all__:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    from vfiomgr.planner import intents  # noqa: PLC0415 - what plans a guest needs none of them

    return getattr(intents, name)
