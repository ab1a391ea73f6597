"""Layouts as YAML that reads back as the same value."""

from __future__ import annotations

import re
from io import StringIO
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.resolver import Resolver
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from vfiomgr.model.layout import VgpuWish

if TYPE_CHECKING:
    from vfiomgr.model.layout import Layout, LayoutFile

_FIRST = ("select", "state", "at_least")
_LAST = "vgpus"
"""What a rule says first, and last; all else is between, in the order of the model."""
_LISTS = frozenset({"devices", "vgpus", "uuids"})
"""Keys whose values are lists even with one entry."""
_BASE_60 = re.compile(r"[0-9a-f]+(:[0-9a-f]{1,2})+(\.[0-9]*)?")
"""Addresses, some of which YAML 1.1 takes for numbers of base 60."""
_TEXT = "tag:yaml.org,2002:str"
_WIDTH = 100


def render_layouts(file: LayoutFile) -> str:
    """The file as YAML, without what is said by saying nothing."""
    yaml = YAML()
    yaml.width = _WIDTH
    yaml.allow_unicode = False  # like JSON: nothing reaches a terminal as it is
    yaml.indent(mapping=2, sequence=4, offset=2)
    out = StringIO()
    yaml.dump(document_of(file), out)
    return out.getvalue()


def document_of(file: LayoutFile) -> dict[str, Any]:
    """The file as JSON has it, its keys in the order of people."""
    layouts = {_quoted(name): _layout(layout) for name, layout in file.layouts.items()}
    return {"version": file.version, "layouts": layouts}


def _layout(layout: Layout) -> dict[str, Any]:
    document = _plain(layout)
    return {**document, "devices": [_rule(rule) for rule in layout.devices]}


def _rule(rule: BaseModel) -> dict[str, Any]:
    document = _plain(rule)
    document["select"] = _select(document["select"])
    ordered = (*_FIRST, *(key for key in document if key not in (*_FIRST, _LAST)), _LAST)
    return {key: document[key] for key in ordered if key in document}


def _select(document: dict[str, Any]) -> str | dict[str, Any]:
    return "all" if list(document) == ["all"] else document


def _plain(part: BaseModel) -> dict[str, Any]:
    """The keys of a part that were not left at their defaults; one value stands for a list."""
    found: dict[str, Any] = {}
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if field.is_required() or value != field.get_default():
            found[field.alias or name] = _value(name, value)
    return found


def _value(name: str, value: object) -> object:
    if isinstance(value, tuple):
        items = [_plain(item) if isinstance(item, VgpuWish) else _scalar(item) for item in value]
        return items[0] if len(items) == 1 and name not in _LISTS else items
    if isinstance(value, dict):
        return {_quoted(key): _scalar(text) for key, text in value.items()}
    return _scalar(value)


def _scalar(value: object) -> object:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, BaseModel):
        return _plain(value)
    return _quoted(str(value))


def _quoted(text: str) -> str:
    """In quotes where YAML, also of version 1.1, would read something else than a text."""
    kind = str(Resolver().resolve(ScalarNode, text, (True, False)))
    if kind == _TEXT and text and not _BASE_60.fullmatch(text):
        return text
    quoted: str = DoubleQuotedScalarString(text)
    return quoted
