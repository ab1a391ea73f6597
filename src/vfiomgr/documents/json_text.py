"""JSON with the place of everything in it, so that it can be changed by the byte.

What is put in is written by `json`, laid out as its neighbours are; what is around it stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from vfiomgr.documents.parsed import Malformed, parse_json
from vfiomgr.errors import InvalidDocument

if TYPE_CHECKING:
    from collections.abc import Iterable

_BLANK = re.compile(r"[ \t\n\r]*")
_FIRST_MEMBER = re.compile(r'\s*\{(\s*)"(?:[^"\\]|\\.)*"\s*(:\s*)')
_REMEDY = "have the runtime write it anew, or mend it there, or just before"


@dataclass(frozen=True, slots=True)
class Layout:
    """How the parts of an object or a list stand: on a line each, or all on one line."""

    indent: str | None
    """Before a part, on a line of its own; None where they share a line."""
    outer: str
    """Before the closing bracket, where that is on a line of its own."""
    step: str
    """What one level is indented by."""
    newline: str = "\n"
    comma: str = ","
    colon: str = ":"

    def lead(self) -> str:
        """What stands between an opening bracket, or a comma, and a part."""
        return "" if self.indent is None else self.newline + self.indent

    def written(self, value: object, *, in_line: bool) -> str:
        """A value as it is written in one of these parts."""
        if self.indent is None or in_line:
            return json.dumps(value, separators=(self.comma, self.colon), ensure_ascii=False)
        text = json.dumps(value, indent=self.step, separators=(",", self.colon), ensure_ascii=False)
        return text.replace("\n", self.lead())


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A value and where it stands; `parts` are the places of its items, or members with keys."""

    start: int
    stop: int
    value: Any
    members: Mapping[str, Node]
    items: Sequence[Node]
    parts: Sequence[tuple[int, int]]
    layout: Layout

    def at(self, path: Iterable[str]) -> Node | None:
        """The value that keys lead to."""
        found: Node | None = self
        for key in path:
            found = found.members.get(key) if found is not None else None
        return found


@dataclass(frozen=True, slots=True)
class Document:
    """A text of JSON; its root is an object."""

    source: str
    text: str
    root: Node

    def fail(self, node: Node, what: str, remedy: str) -> NoReturn:
        """Refuse what is written somewhere.

        Raises:
            InvalidDocument: always.

        """
        line, column = _place(self.text, node.start)
        message = f"{self.source}:{line}:{column}: {what}"
        raise InvalidDocument(message, remedy)

    def with_parts(self, node: Node, new: Sequence[object] | Mapping[str, object]) -> Document:
        """The document with items at the end of a list, or members at the end of an object."""
        if not new:
            return self
        layout = node.layout
        last = self.text[slice(*node.parts[-1])] if node.parts else ""
        in_line = bool(last) and "\n" not in last and last.endswith(("}", "]"))
        if isinstance(new, dict):
            in_line = False
            texts = [
                json.dumps(key, ensure_ascii=False)
                + layout.colon
                + layout.written(value, in_line=False)
                for key, value in new.items()
            ]
        else:
            texts = [layout.written(value, in_line=in_line) for value in new]
        gap = layout.comma if layout.indent is None else f",{layout.lead()}"
        body = gap.join(texts)
        if node.parts:
            place = node.parts[-1][1]
            return self._changed(place, place, gap + body)
        end = "" if layout.indent is None else layout.newline + layout.outer
        return self._changed(node.start + 1, node.stop - 1, layout.lead() + body + end)

    def without_parts(self, node: Node, numbers: Iterable[int]) -> Document:
        """The document without some items or members, by their numbers."""
        gone = set(numbers)
        kept = [number for number in range(len(node.parts)) if number not in gone]
        if not gone:
            return self
        if not kept:
            return self._changed(node.start + 1, node.stop - 1, "")
        text = self.text
        for number in sorted((n for n in gone if n > kept[0]), reverse=True):
            text = text[: node.parts[number - 1][1]] + text[node.parts[number][1] :]
        text = text[: node.parts[0][0]] + text[node.parts[kept[0]][0] :]
        return read_document(text, self.source)

    def without_member(self, node: Node, key: str) -> Document:
        """The document without a member of an object."""
        return self.without_parts(node, [list(node.members).index(key)])

    def with_text(self, node: Node, text: str) -> Document:
        """The document with another text in the place of a value."""
        return self._changed(node.start, node.stop, text)

    def with_value(self, node: Node, value: object) -> Document:
        """The document with another scalar in the place of one."""
        return self.with_text(node, json.dumps(value, ensure_ascii=False))

    def _changed(self, start: int, stop: int, new: str) -> Document:
        return read_document(self.text[:start] + new + self.text[stop:], self.source)


def read_document(text: str, source: str) -> Document:
    """Read a text of JSON whose root is an object.

    Raises:
        InvalidDocument: it is none, or says something twice; the message names line and column.

    """
    try:
        parse_json(text)
    except Malformed as error:
        place = f":{error.line}:{error.column}" if error.line else ""
        what = "not JSON" if place else "not JSON that a runtime reads"
        message = f"{source}{place}: {what}: {error.why}"
        raise InvalidDocument(message, _REMEDY) from None
    reader = _Reader(text, source)
    root = reader.value(_skip(text, 0), None, 0)
    document = Document(source, text, root)
    if not isinstance(root.value, dict):
        document.fail(root, "not an object", "name the config.json of an OCI bundle")
    return document


def _place(text: str, position: int) -> tuple[int, int]:
    """Line and column, both from 1."""
    before = text[:position]
    return before.count("\n") + 1, position - before.rfind("\n")


def _skip(text: str, position: int) -> int:
    found = _BLANK.match(text, position)
    return found.end() if found else position


class _Reader:
    """Finds the places in a text that is known to be JSON."""

    def __init__(self, text: str, source: str) -> None:
        self._text = text
        self._source = source
        self._style = _style(text)
        self._decode = json.JSONDecoder().raw_decode

    def value(self, start: int, outer: Layout | None, depth: int) -> Node:
        first = self._text[start]
        if first in "{[":
            return self._container(start, outer, depth, is_object=first == "{")
        value, stop = self._decode(self._text, start)
        return Node(start, stop, value, {}, (), (), outer or self._style)

    def _container(self, start: int, outer: Layout | None, depth: int, *, is_object: bool) -> Node:
        text, position = self._text, _skip(self._text, start + 1)
        layout = self._layout(text[start + 1 : position], outer, is_empty=text[position] in "}]")
        members: dict[str, Node] = {}
        items: list[Node] = []
        parts: list[tuple[int, int]] = []
        while text[position] not in "}]":
            begin = position
            if is_object:
                key, position = self._decode(text, position)
                if key in members:
                    line, column = _place(text, begin)
                    message = f"{self._source}:{line}:{column}: the key {key!r} twice"
                    raise InvalidDocument(message, "keep the one that is meant")
                position = _skip(text, _skip(text, position) + 1)
            node = self.value(position, layout, depth + 1)
            if is_object:
                members[key] = node
            else:
                items.append(node)
            parts.append((begin, node.stop))
            position = _skip(text, node.stop)
            if text[position] == ",":
                position = _skip(text, position + 1)
        value: object = (
            {key: node.value for key, node in members.items()}
            if is_object
            else [node.value for node in items]
        )
        if layout.indent is None and len(parts) > 1:
            layout = replace(layout, comma=text[parts[0][1] : parts[1][0]])
        return Node(start, position + 1, value, members, items, parts, layout)

    def _layout(self, blank: str, outer: Layout | None, *, is_empty: bool) -> Layout:
        """Of parts after this blank; those of an empty list or object are as those around it."""
        around = outer or self._style
        if is_empty:
            inner = None if around.indent is None else around.indent + around.step
        else:
            inner = blank.rpartition("\n")[2] if "\n" in blank else None
        return replace(around, indent=inner, outer=around.indent or "")


def _style(text: str) -> Layout:
    """How a text is laid out, by its first member."""
    found = _FIRST_MEMBER.match(text)
    blank, colon = found.groups() if found else ("", ":")
    space = " " if " " in colon else ""
    return Layout(
        indent=None,
        outer="",
        step=blank.rpartition("\n")[2],
        newline="\r\n" if "\r\n" in blank else "\n",
        comma=f",{space}",
        colon=f":{space}",
    )
