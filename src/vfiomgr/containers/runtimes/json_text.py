"""Texts of JSON with values set or taken out by the byte: layout, numbers and order stay."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vfiomgr.containers.runtimes import values
from vfiomgr.documents.json_text import read_document
from vfiomgr.errors import InvalidDocument

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.containers.runtimes.model import OwnedKey, Setting
    from vfiomgr.documents.json_text import Document, Node

_INDENT = 4
"""Of a file that has no layout yet; Docker's own documentation has two or four."""


def parse(text: str, place: str) -> values.Data:
    """What a text says; nothing where it is empty.

    Raises:
        InvalidDocument: it is no object of JSON, or has a key twice, of which Go merges the values.

    """
    return dict(_read(text, place).root.value) if text.strip() else {}


def _read(text: str, place: str) -> Document:
    try:
        return read_document(text, place)
    except InvalidDocument as error:
        raise InvalidDocument(error.message, "mend the file first; nothing was changed") from None


def with_settings(text: str, settings: Iterable[Setting], place: str) -> str:
    """The text with values set; what a table holds is added to, and null is taken for none."""
    settings = tuple(settings)
    if not parse(text, place):
        made = json.dumps(values.with_settings({}, settings), indent=_INDENT, ensure_ascii=False)
        return made + (text[len(text.rstrip()) :] if text.strip() else "\n")
    document = _read(text, place)
    for setting in settings:
        document = _with_value(document, setting.key, setting.value)
    return document.text


def _with_value(document: Document, key: Iterable[str], value: Any) -> Document:  # noqa: ANN401 - documents hold anything
    """The document with one value, in the innermost table that is there already."""
    node, names = document.root, list(key)
    while len(names) > 1 and isinstance(_value(node, names[0]), dict):
        node = node.members[names.pop(0)]
    name, *inner = names
    for outer in reversed(inner):
        value = {outer: value}
    there = node.members.get(name)
    if there is None:
        return document.with_parts(node, {name: value})
    return document.with_text(there, there.layout.written(value, in_line=False))


def _value(node: Node, name: str) -> object:
    there = node.members.get(name)
    return None if there is None else there.value


def without_keys(
    text: str, keys: Iterable[OwnedKey], before: values.Data, place: str
) -> str | None:
    """The text with values as they were before, without tables that were made for them."""
    document = _read(text, place)
    for key in keys:
        node = document.root.at(key.path)
        if node is None:
            continue
        left = values.remaining(node.value, key)
        if left is not values.ABSENT:
            document = document.with_value(node, left)
            continue
        document = _without(document, key.path, before)
    return document.text


def _without(document: Document, path: tuple[str, ...], before: values.Data) -> Document:
    """The document without a member, and without what around it is empty then."""
    for depth in range(len(path), 0, -1):
        table = document.root.at(path[: depth - 1])
        if table is None:
            break
        document = document.without_member(table, path[depth - 1])
        left = document.root.at(path[: depth - 1])
        was_there = values.found(before, path[: depth - 1]) is not values.ABSENT
        if left is None or left.members or was_there:
            break
    return document
