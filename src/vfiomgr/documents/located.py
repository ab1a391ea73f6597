"""Values with the place of every part, so that errors can give line and column."""

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
    """A value and its place; lists and mappings contain parts."""

    place: Position
    scalar: object = None
    """For a scalar: its value."""
    text: str = ""
    """For a scalar: its text."""
    items: tuple[Located, ...] | None = None
    members: dict[str, Located] | None = None
    keys: dict[str, Position] = field(default_factory=dict)
    """The places of the members' keys."""
    is_plain: bool = False
    """For a scalar: whether it has no quotes, so that readers may interpret it differently."""
    stop: int = 0
    """For JSON: the end of its text."""

    @property
    def is_empty(self) -> bool:
        """Whether the value is missing, as after a key without a value."""
        return self.scalar is None and self.items is None and self.members is None

    @property
    def value(self) -> Any:  # noqa: ANN401 - as JSON has it
        """The value without places."""
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
        """The part at a path of keys and numbers."""
        here: Located | None = self
        for part in path:
            here = None if here is None else here.child(part)
        return here

    def place_of(self, path: Path) -> Position:
        """The place of a member's key or of an item; for an absent part, that of its parent."""
        while path:
            parent, here = self.at(path[:-1]), self.at(path)
            if here is not None and parent is not None:
                return parent.keys.get(str(path[-1]), here.place)
            path = path[:-1]
        return self.place

    def descendants(self) -> Iterator[Located]:
        """This part and all parts of it, in the order of the text."""
        yield self
        for part in (*(self.items or ()), *(self.members or {}).values()):
            yield from part.descendants()
