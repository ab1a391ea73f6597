"""What a parent of mediated devices has left, and the errno where that is nothing."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.fakes.mdevs import MdevType


class Budget(Protocol):
    """How many instances of each type there is room for, beside those that are there.

    Parents that share one and have the same instances have the same room.
    """

    @property
    def full(self) -> int:
        """The errno of one instance too many."""
        ...

    @property
    def sharers(self) -> Sequence[str]:
        """The places of the other parents that draw on it."""
        ...

    def counts(self, types: Sequence[MdevType], taken: Sequence[MdevType]) -> dict[str, int]:
        """For each type's id how many more; `taken` are the parent's own instances."""
        ...


@dataclass(frozen=True)
class Pool:
    """One quantity for all types: mbochs's megabytes, mtty's ports, a GPU's framebuffer.

    With `same_cost_only` all instances have one cost, as NVIDIA's time-sliced vGPUs.
    """

    size: int
    same_cost_only: bool = False
    full: int = errno.ENOSPC
    sharers: tuple[str, ...] = ()

    def counts(self, types: Sequence[MdevType], taken: Sequence[MdevType]) -> dict[str, int]:
        """What is left, divided by the cost of each."""
        left = self.size - sum(kind.cost for kind in taken)
        locked = {kind.cost for kind in taken} if self.same_cost_only else set()
        return {k.id: left // k.cost if not locked or k.cost in locked else 0 for k in types}


@dataclass(frozen=True)
class Number:
    """A number of instances, of whatever types: max_instances of mdev itself (mdev_core.c)."""

    maximum: int
    full: int = errno.EUSERS
    sharers: tuple[str, ...] = ()

    def counts(self, types: Sequence[MdevType], taken: Sequence[MdevType]) -> dict[str, int]:
        """The same for each type."""
        return dict.fromkeys((kind.id for kind in types), self.maximum - len(taken))


@dataclass(frozen=True)
class Amounts:
    """Several quantities at once, of which the scarcest decides: GVT-g's memory and fences.

    `costs` says of each type what one instance takes, in the order of `sizes`.
    """

    sizes: tuple[int, ...]
    costs: Mapping[str, tuple[int, ...]]
    full: int = errno.ENOSPC
    sharers: tuple[str, ...] = ()

    def counts(self, types: Sequence[MdevType], taken: Sequence[MdevType]) -> dict[str, int]:
        """The least of what each quantity allows."""
        left = [
            size - sum(self.costs[kind.id][index] for kind in taken)
            for index, size in enumerate(self.sizes)
        ]
        return {kind.id: self._least(left, kind.id) for kind in types}

    def _least(self, left: Sequence[int], type_id: str) -> int:
        return min(have // cost for have, cost in zip(left, self.costs[type_id], strict=True))
