"""JSON with the place of everything in it, without the slow way over YAML."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from typing import TYPE_CHECKING

from vfiomgr.model.located import Located, Place
from vfiomgr.model.parsed import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterator

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|[^\s{}\[\],:"]+')
_NEWLINE = re.compile("\n")


def read_json(text: str) -> Located | None:
    """What a text says; None where it is no JSON, or has a key twice, which only YAML tells of."""
    try:
        parse_json(text)
        return _Reader(text).read()
    except ValueError:
        return None


class _Reader:
    """Reads tokens of a text that is JSON."""

    def __init__(self, text: str) -> None:
        self._lines = [match.start() for match in _NEWLINE.finditer(text)]
        self._tokens: Iterator[re.Match[str]] = _TOKEN.finditer(text)

    def read(self) -> Located:
        return self._value(next(self._tokens))

    def _place(self, token: re.Match[str]) -> Place:
        line = bisect_left(self._lines, token.start())
        start = self._lines[line - 1] + 1 if line else 0
        return Place(line + 1, token.start() - start + 1)

    def _value(self, token: re.Match[str]) -> Located:
        text, place = token[0], self._place(token)
        if text == "{":
            return self._mapping(place)
        if text == "[":
            items: list[Located] = []
            while (item := next(self._tokens))[0] != "]":
                items.append(self._value(item))
            return Located(place, items=tuple(items))
        if text.startswith('"'):
            meant = _string(text)
            return Located(place, meant, meant)
        return Located(place, json.loads(text), text, is_plain=True)

    def _mapping(self, place: Place) -> Located:
        members: dict[str, Located] = {}
        keys: dict[str, Place] = {}
        while (token := next(self._tokens))[0] != "}":
            key = _string(token[0])
            if key in keys:
                message = f"{key} twice"
                raise ValueError(message)
            keys[key] = self._place(token)
            members[key] = self._value(next(self._tokens))
        return Located(place, members=members, keys=keys)


def _string(token: str) -> str:
    return str(json.loads(token)) if "\\" in token else token[1:-1]
