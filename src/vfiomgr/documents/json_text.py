"""JSON with the place of every part, and changes of values in JSON texts.

New parts are written by `json` in the layout of their neighbours; the rest keeps its text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace

from vfiomgr.diagnostic import Position
from vfiomgr.documents.text import Located, Malformed, parse_json, require_few
from vfiomgr.errors import InvalidDocument
from vfiomgr.expressions import expression
from vfiomgr.value import Value

if TYPE_CHECKING:
    import re
_TOKEN = expression(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|[^\s{}\[\],:"]+')
_NEWLINE = expression("\n")
_MOST_VALUES = 1_000_000
"""Maximum number of values with places, about 300 bytes each."""


class Repeated(Malformed):
    """A repeated key of an object: valid JSON that readers interpret differently."""


def read_json(text: str) -> Located:
    """The value of a text.

    Raises:
        Malformed: it is not JSON.
        TooMany: it has too many values.
        Repeated: a key is repeated.
    """
    require_few(text, _MOST_VALUES)
    parse_json(text)
    return _Reader(text).read()


class _Reader:
    """Reads the tokens of a JSON text."""

    def __init__(self, text: str) -> None:
        self._lines = _line_starts(text)
        self._tokens: Iterator[re.Match[str]] = _TOKEN.finditer(text)

    def read(self) -> Located:
        return self._value(next(self._tokens))

    def _place(self, token: re.Match[str]) -> Position:
        line = bisect_left(self._lines, token.start() + 1)
        return Position(line, token.start() - self._lines[line - 1] + 1)

    def _value(self, token: re.Match[str]) -> Located:
        import json  # noqa: PLC0415 - `list` needs none

        text, place = token[0], self._place(token)
        if text == "{":
            return self._mapping(place)
        if text == "[":
            items: list[Located] = []
            while (item := next(self._tokens))[0] != "]":
                items.append(self._value(item))
            return Located(place, items=tuple(items), stop=item.end())
        if text.startswith('"'):
            meant = _string(text)
            return Located(place, meant, meant, stop=token.end())
        return Located(place, json.loads(text), text, is_plain=True, stop=token.end())

    def _mapping(self, place: Position) -> Located:

        members: dict[str, Located] = {}
        keys: dict[str, Position] = {}
        while (token := next(self._tokens))[0] != "}":
            key, at = _string(token[0]), self._place(token)
            if key in keys:
                why = f"duplicate key {key!r}"
                raise Repeated(why, at.line, at.column)
            keys[key] = at
            members[key] = self._value(next(self._tokens))
        return Located(place, members=members, keys=keys, stop=token.end())


def _string(token: str) -> str:
    import json  # noqa: PLC0415 - `list` needs none

    return str(json.loads(token)) if "\\" in token else token[1:-1]


def _line_starts(text: str) -> list[int]:
    return [0, *(match.end() for match in _NEWLINE.finditer(text))]


def _offset(lines: Sequence[int], place: Position) -> int:
    return lines[place.line - 1] + place.column - 1


class JsonDocument(Value):
    """A JSON text whose root is an object."""

    source: str
    text: str
    root: Located

    def fail(self, part: Located, what: str, remedy: str) -> NoReturn:
        """Reject the text at a place.

        Raises:
            InvalidDocument: always.
        """
        message = f"{self.source}:{part.place.line}:{part.place.column}: {what}"
        raise InvalidDocument(message, remedy)

    def with_value(self, value: object) -> JsonDocument:
        """The document with another value; unchanged parts keep their text."""
        text = _Writer(self.text).written(self.root, value)
        return self if text == self.text else read_object(text, self.source)

    def text_of(self, part: Located) -> str:
        """The text of a part."""
        return self.text[_offset(_line_starts(self.text), part.place) : part.stop]


class Verbatim(str):
    """A JSON text that is used as a value."""

    __slots__ = ()


def read_object(text: str, source: str) -> JsonDocument:
    """Read a JSON text whose root is an object.

    Raises:
        InvalidDocument: the root is not an object, or a key is repeated; with line and column.
    """
    try:
        document = JsonDocument(source, text, read_json(text))
    except Repeated as error:
        message = f"{source}:{error.line}:{error.column}: {error.why}"
        raise InvalidDocument(message, "keep one of them") from None
    except Malformed as error:
        place = f":{error.line}:{error.column}" if error.line else ""
        what = "not JSON" if place else "not JSON that a runtime can read"
        remedy = "let the runtime write it again, or correct it there or just before"
        message = f"{source}{place}: {what}: {error.why}"
        raise InvalidDocument(message, remedy) from None
    if document.root.members is None:
        document.fail(document.root, "not an object", "use the config.json of an OCI bundle")
    return document


class _Layout(Value):
    """The layout of the parts of an object or a list: one per line, or all on one line."""

    indent: str | None
    """The text before a part on its own line; None if they share a line."""
    outer: str
    """The text before a closing bracket on its own line."""
    step: str
    """The indentation of one level."""
    newline: str = "\n"
    comma: str = ","
    colon: str = ":"

    @property
    def lead(self) -> str:
        """The text between an opening bracket or a comma and a part."""
        return "" if self.indent is None else self.newline + self.indent

    @property
    def gap(self) -> str:
        """The text between two parts."""
        return self.comma if self.indent is None else f",{self.lead}"

    def written(self, value: object, *, in_line: bool = False) -> str:
        """The text of a value in this layout."""
        import json  # noqa: PLC0415 - `list` needs none

        if isinstance(value, Verbatim):
            return str(value)
        if self.indent is None or in_line:
            return json.dumps(value, separators=(self.comma, self.colon), ensure_ascii=False)
        text = json.dumps(value, indent=self.step, separators=(",", self.colon), ensure_ascii=False)
        return text.replace("\n", self.lead)


_FIRST_MEMBER = expression(r'\s*\{(\s*)"(?:[^"\\]|\\.)*"\s*(:\s*)')


def _style(text: str) -> _Layout:
    """The style of a text, judged by its first member."""
    found = _FIRST_MEMBER.match(text)
    blank, colon = found.groups() if found else ("", ":")
    space = " " if " " in colon else ""
    return _Layout(
        indent=None,
        outer="",
        step=blank.rpartition("\n")[2],
        newline="\r\n" if "\r\n" in blank else "\n",
        comma=f",{space}",
        colon=f":{space}",
    )


class _Writer:
    """Writes a value into the text of another one."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._lines = _line_starts(text)

    def written(self, part: Located, value: object) -> str:
        """The entire text."""
        start = self._offset(part.place)
        made = self._part(part, value, _style(self._text))
        return self._text[:start] + made + self._text[part.stop :]

    def _offset(self, place: Position) -> int:
        return _offset(self._lines, place)

    def _part(self, part: Located, value: object, around: _Layout) -> str:
        """The text of a value in the place of a part, among parts with this layout."""
        if not isinstance(value, Verbatim) and _is_same(part.value, value):
            return self._text[self._offset(part.place) : part.stop]
        if part.members is not None and isinstance(value, dict):
            return self._mapping(part, value, around)
        if part.items is not None and isinstance(value, list):
            return self._list(part, value, around)
        return around.written(value)

    def _mapping(self, part: Located, value: dict[str, Any], around: _Layout) -> str:
        import json  # noqa: PLC0415 - `list` needs none

        members = part.members or {}
        spans = [(self._offset(part.keys[key]), one.stop) for key, one in members.items()]
        layout = self._layout(part, spans, around)
        inner = replace(layout, comma=around.comma)
        texts: list[str | None] = []
        for (start, _), (key, member) in zip(spans, members.items(), strict=True):
            head = self._text[start : self._offset(member.place)]
            texts.append(head + self._part(member, value[key], inner) if key in value else None)
        new = [
            json.dumps(key, ensure_ascii=False) + layout.colon + layout.written(one)
            for key, one in value.items()
            if key not in members
        ]
        return self._joined(part, spans, texts, new, layout)

    def _list(self, part: Located, value: list[Any], around: _Layout) -> str:
        """Removed items disappear; new ones are appended."""
        items = part.items or ()
        spans = [(self._offset(item.place), item.stop) for item in items]
        layout = self._layout(part, spans, around)
        texts: list[str | None] = []
        rest = list(value)
        for (start, stop), item in zip(spans, items, strict=True):
            is_left = bool(rest) and _is_same(item.value, rest[0])
            texts.append(self._text[start:stop] if is_left else None)
            rest = rest[is_left:]
        last = self._text[slice(*spans[-1])] if spans else ""
        in_line = bool(last) and "\n" not in last and last.endswith(("}", "]"))
        new = [layout.written(one, in_line=in_line) for one in rest]
        return self._joined(part, spans, texts, new, layout)

    def _joined(
        self,
        part: Located,
        spans: Sequence[tuple[int, int]],
        texts: Sequence[str | None],
        new: Sequence[str],
        layout: _Layout,
    ) -> str:
        """An object or list of the remaining and the new parts."""
        start, stop = self._offset(part.place), part.stop
        opening, closing = self._text[start], self._text[stop - 1]
        gaps = [self._text[one[1] : two[0]] for one, two in pairwise(spans)]
        body = ""
        for gap, text in zip(["", *gaps], texts, strict=False):
            if text is not None:
                body += (gap if body else "") + text
        added = layout.gap.join(new)
        if body:
            before, after = self._text[start + 1 : spans[0][0]], self._text[spans[-1][1] : stop - 1]
            return opening + before + body + (layout.gap + added if new else "") + after + closing
        if not new:
            return opening + closing
        end = "" if layout.indent is None else layout.newline + layout.outer
        return opening + layout.lead + added + end + closing

    def _layout(self, part: Located, spans: Sequence[tuple[int, int]], around: _Layout) -> _Layout:
        """The layout of the parts; an empty list or object uses that of its surroundings."""
        blank = self._text[self._offset(part.place) + 1 : spans[0][0]] if spans else ""
        if not spans:
            indent = None if around.indent is None else around.indent + around.step
        else:
            indent = blank.rpartition("\n")[2] if "\n" in blank else None
        layout = replace(around, indent=indent, outer=around.indent or "")
        if indent is None and len(spans) > 1:
            layout = replace(layout, comma=self._text[spans[0][1] : spans[1][0]])
        return layout


def _is_same(one: object, other: object) -> bool:
    """Whether two values have the same text; in Python, 1 equals true."""
    import json  # noqa: PLC0415 - `list` needs none

    return json.dumps(one) == json.dumps(other)
