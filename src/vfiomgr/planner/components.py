"""Things that belong together, since they have something in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

_Thing = TypeVar("_Thing")


def components(
    things: Iterable[_Thing], keys_of: Callable[[_Thing], Iterable[Hashable]]
) -> list[list[_Thing]]:
    """Batches of things that share a key, directly or through others; in their first order."""
    leader: dict[Hashable, Hashable] = {}

    def find(key: Hashable) -> Hashable:
        root = key
        while leader.setdefault(root, root) != root:
            root = leader[root]
        while leader[key] != root:
            leader[key], key = root, leader[key]
        return root

    placed: list[tuple[_Thing, Hashable]] = []
    for number, thing in enumerate(things):
        first: Hashable = ("thing", number)
        for key in keys_of(thing):
            leader[find(key)] = find(first)
        placed.append((thing, first))
    batches: dict[Hashable, list[_Thing]] = {}
    for thing, first in placed:
        batches.setdefault(find(first), []).append(thing)
    return list(batches.values())
