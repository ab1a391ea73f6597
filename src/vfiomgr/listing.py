"""Lists in messages: the first items, and the number of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

_Item = TypeVar("_Item")


def first_of(
    items: Sequence[_Item], most: int, how: str = ""
) -> tuple[Sequence[_Item], tuple[str, ...]]:
    """The first items, and a line with the number of others, if there are any.

    `how` follows the number: how to list them.
    """
    omitted = len(items) - most
    return items[:most], (f"and {omitted} more{how}",) if omitted > 0 else ()


def listed(texts: Sequence[str], most: int, how: str = "") -> str:
    """`A, B and 3 more`."""
    shown, more = first_of(texts, most, how)
    return " ".join((", ".join(shown), *more))
