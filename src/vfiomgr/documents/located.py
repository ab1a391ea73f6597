"""Values with the place of everything in them: what is wrong can be told by line and column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import field

from vfiomgr.diagnostic import Position
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

Path = tuple[str | int, ...]
"""The keys and numbers that lead to a part of a document."""


def shown_path(path: Path) -> str:
    """`devices[0].containerEdits.deviceNodes[1].path`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


class Located(Value, eq=False):
    """A value and its place; lists and mappings have their parts."""

    place: Position
    scalar: object = None
    """Of a scalar: what it means."""
    text: str = ""
    """Of a scalar: as it is written."""
    items: tuple[Located, ...] | None = None
    members: dict[str, Located] | None = None
    keys: dict[str, Position] = field(default_factory=dict)
    """Where the keys of the members are."""
    is_plain: bool = False
    """Of a scalar: whether it has no quotes, so that readers may take it for different things."""
    stop: int = 0
    """Of JSON: where its text ends."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing, as after a key without a value."""
        return self.scalar is None and self.items is None and self.members is None

    @property
    def value(self) -> Any:  # noqa: ANN401 - as JSON has it
        """The same without places."""
        if self.items is not None:
            return [item.value for item in self.items]
        if self.members is not None:
            return {key: member.value for key, member in self.members.items()}
        return self.scalar

    def child(self, part: str | int) -> Located | None:
        """A member or an item."""
        if isinstance(part, str):
            return (self.members or {}).get(part)
        return self.items[part] if self.items is not None and part < len(self.items) else None

    def at(self, path: Path) -> Located | None:
        """The part that keys and numbers lead to."""
        here: Located | None = self
        for part in path:
            here = None if here is None else here.child(part)
        return here

    def place_of(self, path: Path) -> Position:
        """Where the key of a member is, or an item begins; of what is not there, what is around."""
        while path:
            parent, here = self.at(path[:-1]), self.at(path)
            if here is not None and parent is not None:
                return parent.keys.get(str(path[-1]), here.place)
            path = path[:-1]
        return self.place

    def descendants(self) -> Iterator[Located]:
        """This and all parts, from the start of the text to its end."""
        yield self
        for part in (*(self.items or ()), *(self.members or {}).values()):
            yield from part.descendants()
