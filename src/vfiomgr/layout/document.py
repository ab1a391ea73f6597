"""Layout files: written as YAML, and read as YAML 1.2 or JSON."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from contextlib import suppress
from io import StringIO
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from pydantic import BaseModel, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.resolver import Resolver
from ruamel.yaml.scalarstring import DoubleQuotedScalarString

from vfiomgr.diagnostic import Diagnostic, Position, by_place, flaw, invalid_document
from vfiomgr.documents.jsonable import UNFOLDED
from vfiomgr.documents.reader import Unreadable, Wording, read_located
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.layout.diagnostics import (
    ANY_RULE,
    RULES,
    idle_rules,
    items_of,
    keys_of,
    no_value,
    remedy_for,
    repeated_uuids,
    shown,
    unknown_key,
    wrong_value,
)
from vfiomgr.layout.model import VERSION, Layout, LayoutFile, Rule, Selector, VgpuRequest
from vfiomgr.listing import first_of
from vfiomgr.pci.model import PciAddress
from vfiomgr.rules.runner import RuleSet, register, rule

if TYPE_CHECKING:
    from vfiomgr.documents.text import Located, Path


_FIRST = ("select", "state", "at_least")
_LAST = "vgpus"
"""The first and last keys of a rule; the others are between, in the order of the model."""
_LISTS = frozenset({"devices", "vgpus", "uuids"})
"""Keys whose values are always written as lists."""
_BASE_60 = expression(r"[0-9a-f]+(:[0-9a-f]{1,2})+(\.[0-9]*)?")
"""Addresses, some of which YAML 1.1 reads as numbers of base 60."""
_TEXT = "tag:yaml.org,2002:str"


def render_layouts(file: LayoutFile) -> str:
    """The file as YAML, without default values."""
    return yaml_text(document_of(file))


def yaml_text(document: dict[str, Any]) -> str:
    """A document as YAML; its texts must be `quoted` where YAML would not read them as texts."""
    yaml = YAML()
    yaml.width = UNFOLDED
    yaml.allow_unicode = False  # like JSON: nothing reaches a terminal as it is
    yaml.indent(mapping=2, sequence=4, offset=2)
    out = StringIO()
    yaml.dump(document, out)
    return out.getvalue()


def document_of(file: LayoutFile) -> dict[str, Any]:
    """The file as JSON data, with keys in a readable order."""
    layouts = {quoted(name): _plain(layout) for name, layout in file.layouts.items()}
    return {"version": file.version, "layouts": layouts}


def _plain(value: object, key: str = "") -> object:
    """A value as JSON data, without defaults; a list of one becomes a single value."""
    if isinstance(value, BaseModel):
        return _members(value)
    if isinstance(value, tuple) and not isinstance(value, PciAddress):
        items = [_plain(item) for item in value]
        return items[0] if len(items) == 1 and key not in _LISTS else items
    if isinstance(value, dict):
        return {quoted(name): _plain(text) for name, text in value.items()}
    return value if value is None or isinstance(value, bool | int) else quoted(str(value))


def _members(part: BaseModel) -> dict[str, object] | str:
    found: dict[str, object] = {}
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if field.is_required() or value != field.get_default():
            found[field.alias or name] = _plain(value, name)
    if found == {"all": True}:
        return "all"
    ordered = (*_FIRST, *(key for key in found if key not in (*_FIRST, _LAST)), _LAST)
    return {key: found[key] for key in ordered if key in found}


def quoted(text: str) -> str:
    """In quotes if YAML, including version 1.1, would read it as something else than text."""
    kind = str(Resolver().resolve(ScalarNode, text, (True, False)))
    if kind == _TEXT and text and not _BASE_60.fullmatch(text):
        return text
    quoted: str = DoubleQuotedScalarString(text)
    return quoted


__all__ = ["choose_layout", "find_flaws", "quoted", "read_layouts", "render_layouts", "yaml_text"]

_HINT = "see docs/layout.md for the format; print its schema with vfiomgr check layout --schema"
_TOLD_ELSEWHERE = ("uuids are the same", "are to have the UUID")
"""How the model reports UUIDs; `repeated_uuids` names them, with their places."""
_OTHER_KINDS = {
    "HostSnapshot": "pass it with --snapshot FILE",
    "LayoutPlan": "apply it with: vfiomgr apply FILE",
}
"""Documents of vfiomgr that are not layouts, and how they are used."""
_XML = expression(r"\ufeff?\s*<[?!A-Za-z]")
_MOST_NAMES = 40
"""Maximum number of layouts that a message names."""
_MOST_FLAWS = 1000
"""Maximum number of reported errors; each takes a comparison with all known words."""
_DEVICES = 4
"""Length of the path of a rule: layouts, a name, devices, a number."""


def read_layouts(text: str, source: str) -> LayoutFile:
    """Read a file of layouts, YAML 1.2 or JSON; `source` names it in errors.

    Raises:
        InvalidDocument: all errors, each with line, column and remedy.
    """
    read, flaws = find_flaws(text)
    if read is not None:
        return read
    raise invalid_document(source, flaws, _HINT)


def choose_layout(file: LayoutFile, name: str | None) -> tuple[str, Layout]:
    """The layout with this name; without a name, the only one.

    Raises:
        UsageError: no layout has this name, or the name is missing and there are several.
    """
    first, more = first_of(tuple(file.layouts), _MOST_NAMES)
    names = ", ".join((*first, *more))
    if name is None:
        if len(file.layouts) > 1:
            message = f"missing option: --layout NAME (the file has {names})"
            raise UsageError(message, f"pass one of them, e.g. --layout {next(iter(file.layouts))}")
        return next(iter(file.layouts.items()))
    if name not in file.layouts:
        near = difflib.get_close_matches(name, file.layouts, 1)
        guess = f"did you mean {near[0]}?" if near else f"use one of {names}"
        message = f"no such layout in the file: {name!r} (it has {names})"
        raise UsageError(message, guess)
    return name, file.layouts[name]


def find_flaws(text: str) -> tuple[LayoutFile | None, tuple[Diagnostic, ...]]:
    """The content of a text, or all its errors."""
    if _XML.match(text):
        what, remedy = "this is XML, not a layout", _WORDING.start
        return None, (flaw("layout-other-document", Position(), "", what, remedy),)
    try:
        document, flaws = read_located(text, _WORDING)
    except Unreadable as error:
        return None, (error.flaw,)
    if document.is_empty:
        remedy = f"begin with version: {VERSION}"
        return None, (flaw("unreadable", Position(), "", "the file is empty", remedy),)
    if document.members is None:
        remedy = f"begin with version: {VERSION}, and layouts by name below layouts"
        what = f"a layout file is a mapping, but this is {shown(document)}"
        return None, (flaw("layout-other-document", document.place, "", what, remedy),)
    kind = document.members.get("kind")
    if kind is not None and "layouts" not in document.members:
        remedy = _OTHER_KINDS.get(kind.text, f"a layout begins with version: {VERSION}")
        what = f"this is a {kind.text}, not a layout"
        return None, (flaw("layout-other-document", kind.place, "", what, remedy),)
    layouts = LayoutText(document)
    found = tuple(sorted({*flaws, *_first(DOCUMENT_RULES.find(layouts))}, key=by_place))
    return (None, found) if found else (layouts.read, ())


def _first(flaws: Iterator[Diagnostic]) -> Iterator[Diagnostic]:
    """The first errors; if there are more, the last one says so."""
    found = None
    for found in islice(flaws, _MOST_FLAWS):
        yield found
    if found is not None and next(flaws, None) is not None:
        what = f"there are more than {_MOST_FLAWS} errors: the rest of the file was not checked"
        place = found.place or Position()
        yield flaw("layout-unchecked", place, "", what, "correct the errors above first")


class LayoutText(Struct):
    """A well-formed document, which may have errors of meaning: the context of its rules."""

    document: Located
    read: LayoutFile | None = None
    """Its content, if no value is wrong."""

    def state(self, path: Path) -> str | None:
        """The state of the rule that a path leads into."""
        if len(path) < _DEVICES or path[0] != "layouts" or path[2] != "devices":
            return None
        state = self.document.at((*path[:_DEVICES], "state"))
        return str(state.scalar) if state is not None and state.scalar in RULES else None


def _wrong_values(text: LayoutText) -> Iterator[Diagnostic]:
    """Wrong, missing and unknown keys and values; if there are none, `read` of the text is set."""
    told = set()
    for path, found in _by_hand(text):
        told.add(path)
        yield found
    seen = {path[:-1] for path in told if _key(path[:-1]) == "select"}
    for path, error in _errors(text):
        begins = (path[:length] for length in range(len(path) + 1))
        if path not in seen and told.isdisjoint(begins):
            seen.add(path)
            yield _flaw(text, path, error)


def _errors(text: LayoutText) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Where pydantic finds errors, each place once."""
    try:
        written = json.dumps(text.document.value, default=str)
        text.read = LayoutFile.model_validate_json(written, strict=True)
    except ValidationError as errors:
        for error in errors.errors(include_url=False):
            if not any(words in error["msg"] for words in _TOLD_ELSEWHERE):
                yield _path(text.document, error["loc"], error["type"]), dict(error)


def _path(document: Located, location: Path, kind: str) -> Path:
    """The keys and numbers that lead to a place, without pydantic's own labels."""
    path: list[str | int] = []
    here: Located | None = document
    last = len(location) - 1
    for index, part in enumerate(location):
        if index == _DEVICES and part in RULES and location[0] == "layouts":
            continue
        child = None if here is None else here.child(part)
        if child is not None:
            path.append(part)
            here = child
        elif index == last and kind in ("missing", "extra_forbidden"):
            path.append(part)
    return tuple(path)


def _flaw(text: LayoutText, path: Path, error: dict[str, Any]) -> Diagnostic:
    kind, state, document = error["type"], text.state(path), text.document
    here = document.at(path)
    if kind.startswith("union_tag") and here is not None and "state" in (here.members or {}):
        path, here = (*path, "state"), here.child("state")
    elif kind == "union_tag_not_found":
        return _missing(document.place_of(path), path, "state", None)
    elif kind == "missing":
        return _missing(document.place_of(path[:-1]), path, str(path[-1]), state)
    assert here is not None  # noqa: S101 - pydantic names parts of what it was given
    what, remedy = wrong_value(_key(path), here, state, error)
    if kind == "string_too_short" and path == ("layouts", ""):
        what, remedy = "a layout without a name", "write a name before the colon"
    return flaw("layout-value", here.place, _where(path), what, remedy)


def _missing(place: Position, path: Path, key: str, state: str | None) -> Diagnostic:
    remedy = remedy_for(key, state)
    return flaw("layout-key-missing", place, _where(path), f"{key} is missing", remedy)


def _by_hand(text: LayoutText) -> Iterator[tuple[Path, Diagnostic]]:
    """Errors that pydantic describes in other words, or not at all."""
    for path, part in _parts(text.document):
        state = text.state(path)
        if part.is_empty:
            is_member = isinstance(path[-1], str)
            place = text.document.place_of(path) if is_member else part.place
            yield path, flaw("layout-value", place, _where(path), *no_value(_key(path), state))
        elif part.items == () and _key(path[:-1]) == "select":
            what = f"{path[-1]} is an empty list, which selects nothing"
            remedy = remedy_for(str(path[-1]), state)
            yield path, flaw("layout-value", part.place, _where(path), what, remedy)
        elif part.members is not None:
            yield from _wrong_keys(path, part, _model(path, state))


def _wrong_keys(
    path: Path, part: Located, model: type[BaseModel] | None
) -> Iterator[tuple[Path, Diagnostic]]:
    """Unknown keys; a rule without a state is checked too."""
    is_stateless = model is None and _key(path) == "a rule"
    known = keys_of(model) if model is not None else ANY_RULE if is_stateless else part.keys
    for key in part.keys:
        if key not in known:
            what, remedy = unknown_key(key, model, tuple(known))
            found = flaw("layout-key-unknown", part.keys[key], _where(path), what, remedy)
            yield (*path, key), found
    if is_stateless and "select" not in part.keys:
        yield (*path, "select"), _missing(part.place, path, "select", None)


def _layouts(text: LayoutText) -> Iterator[tuple[str, Located]]:
    """The layouts with how messages name them."""
    layouts = text.document.child("layouts")
    for name, layout in () if layouts is None else (layouts.members or {}).items():
        yield f"layout {name}", layout


def _idle_rules(text: LayoutText) -> Iterator[Diagnostic]:
    """Rules whose devices belong to earlier ones, of those that are valid by themselves."""
    adapter: TypeAdapter[Rule] = TypeAdapter(Rule)
    for where, layout in _layouts(text):
        rules: list[tuple[int, Rule, Located]] = []
        for number, item in enumerate(items_of(layout, "devices")):
            with suppress(ValidationError):
                rule = adapter.validate_json(json.dumps(item.value, default=str))
                rules.append((number, rule, item.child("select") or layout))
        yield from idle_rules(where, rules)


def _repeated_uuids(text: LayoutText) -> Iterator[Diagnostic]:
    for where, layout in _layouts(text):
        yield from repeated_uuids(where, layout)


DOCUMENT_RULES: RuleSet[LayoutText] = register(
    RuleSet(
        "a layout file",
        rules=(
            rule(_wrong_values, "layout-key-missing", "layout-key-unknown", "layout-value"),
            rule(_idle_rules, "layout-address-twice", "layout-rule-idle"),
            rule(_repeated_uuids, "layout-uuid-twice"),
        ),
        host=lambda _: None,
    )
)


def _parts(part: Located, path: Path = ()) -> Iterator[tuple[Path, Located]]:
    """All parts of a document, with their paths."""
    yield path, part
    for number, item in enumerate(part.items or ()):
        yield from _parts(item, (*path, number))
    for key, member in (part.members or {}).items():
        yield from _parts(member, (*path, key))


def _model(path: Path, state: str | None) -> type[BaseModel] | None:
    """The model of a part of the document, if its keys are known."""
    match path:
        case ():
            return LayoutFile
        case ("layouts", str()):
            return Layout
        case ("layouts", str(), "devices", int()):
            return None if state is None else RULES[state]
        case ("layouts", str(), "devices", int(), "select"):
            return Selector
        case ("layouts", str(), "devices", int(), "vgpus", int()):
            return VgpuRequest
    return None


def _where(path: Path) -> str:
    """`layout gpus, rule 2, vGPU 1`."""
    match path:
        case ("layouts", str(name), "devices", int(rule), "vgpus", int(vgpu), *_):
            return f"layout {name}, rule {rule + 1}, entry {vgpu + 1} of vgpus"
        case ("layouts", str(name), "devices", int(rule), *_):
            return f"layout {name}, rule {rule + 1}"
        case ("layouts", str(name), *_):
            return f"layout {name}" if name else ""
    return ""


_WORDING = Wording(
    "a layout",
    "layouts",
    _where,
    "a layout begins with: version: vfiomgr/v1",
    "keep one, with all layouts by name below `layouts`",
)


def _key(path: Path) -> str:
    """The last key of a path, or the name of a part with keys of its own."""
    match path:
        case ("layouts", str()):
            return "a layout"
        case ("layouts", str(), "devices", int()):
            return "a rule"
        case (*_, "vgpus", int()):
            return "an entry of vgpus"
        case (*_, "parameters", str()):
            return "parameters"
    return next((part for part in reversed(path) if isinstance(part, str)), "")
