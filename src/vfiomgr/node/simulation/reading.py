"""Reads parts of Kubernetes objects, and collects errors with their places."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

from msgspec import Struct, field

from vfiomgr.diagnostic import Diagnostic, flaw
from vfiomgr.documents.text import Located, Path, shown_path

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from vfiomgr.diagnostic import Position

RULE = "simulation-invalid"
_MOST_GUESSED = 100
"""Maximum number of errors of a file for which a similar name is suggested."""


class Part(Struct):
    """A part of an object, where it is in the object, and the errors of the file."""

    located: Located
    path: Path = ()
    flaws: list[Diagnostic] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Whether there is a value."""
        return not self.located.is_empty

    def at(self, *keys: str | int) -> Part:
        """The part below; without a value if it is absent."""
        found = self.located.at(keys) or Located(self.located.place_of(keys))
        return Part(found, (*self.path, *keys), self.flaws)

    def text(self, *keys: str) -> str:
        """A string below; empty if it is absent."""
        part = self.at(*keys)
        if not part:
            return ""
        if not isinstance(part.located.scalar, str):
            part.reject(f"{keys[-1]} is not a string", "write a string, in quotes if needed")
        return part.located.text

    def choice(self, key: str, choices: Collection[str], default: str) -> str:
        """One of some words below."""
        found = self.text(key) or default
        if found not in choices:
            part = self.at(key)
            part.reject(f"{key} {found!r} is not one of {', '.join(filter(None, choices))}")
            return default
        return found

    def number(self, key: str, default: int, most: int = 1_000_000) -> int:
        """A whole number below that is not negative."""
        part = self.at(key)
        if not part:
            return default
        found = part.located.scalar
        if isinstance(found, bool) or not isinstance(found, int) or not 0 <= found <= most:
            part.reject(f"{key} is not a whole number from 0 to {most}", "write such a number")
            return default
        return found

    def items(self, *keys: str) -> list[Part]:
        """The items of a list below."""
        part = self.at(*keys)
        if part and part.located.items is None:
            part.reject(f"{keys[-1]} is not a list", "start items with -")
        return [part.at(number) for number in range(len(part.located.items or ()))]

    def members(self, *keys: str) -> dict[str, Part]:
        """The members of a mapping below."""
        part = self.at(*keys)
        if part and part.located.members is None:
            part.reject("not a mapping", "write keys with values")
        return {key: part.at(key) for key in part.located.members or {}}

    def texts(self, *keys: str) -> dict[str, str]:
        """The members of a mapping below, as texts."""
        return {key: part.located.text for key, part in self.members(*keys).items()}

    def require_known(self, keys: Collection[str]) -> None:
        """Reject members with other keys."""
        for key, part in self.members().items():
            if key not in keys:
                place = self.located.keys.get(key, part.located.place)
                what = f"unknown key {key!r}"
                remedy = self.guess(key, keys, f"use {', '.join(keys)}")
                self._add(place, self.path, what, remedy)

    def guess(self, name: str, known: Iterable[str], otherwise: str) -> str:
        """The remedy for an unknown name; later errors of a file are not printed."""
        is_early = len(self.flaws) < _MOST_GUESSED
        near = get_close_matches(name, list(known), 1) if is_early else []
        return f"did you mean {near[0]}?" if near else otherwise

    def reject(self, what: str, remedy: str = "correct it") -> None:
        """Report an error here."""
        self._add(self.located.place, self.path, what, remedy)

    def _add(self, place: Position, path: Path, what: str, remedy: str) -> None:
        self.flaws.append(flaw(RULE, place, shown_path(path), what, remedy))
