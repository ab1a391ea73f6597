"""What each document of the JSON contract consists of: from documents.toml and from our classes."""

from __future__ import annotations

import importlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.reference.json_types import Field, Structs, parsed
from vfiomgr.engine.registry import step_kinds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tools.reference.json_types import Type

TABLE = Path(__file__).with_name("documents.toml")
HEAD = {"api_version": "str: `vfiomgr/v1`", "kind": "str: the kind of the document"}
"""What each document begins with."""
_OPTIONAL = "?"
_ANY = frozenset({"any", "layout document"})
_PYTHON: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


@dataclass(frozen=True)
class Object:
    """An object of JSON."""

    name: str
    fields: Mapping[str, Field]
    summary: str = ""
    commands: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    """Fields that only some documents have."""


class Contract:
    """All kinds of documents, and the objects in them."""

    def __init__(self) -> None:
        self._table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
        places = self._table["structs"]
        self._structs = Structs({name: _class(name, place) for name, place in places.items()})
        self.kinds = {name: self._object(name, "kinds") for name in sorted(self._table["kinds"])}
        own = {kind: made for kind, made in step_kinds().items() if _is_own(made)}
        self.steps = {kind: self._step(made) for kind, made in sorted(own.items())}
        self.objects = self._reached()

    def unused(self) -> Iterator[str]:
        """Meanings and words that no field has."""
        made = [*self.kinds.values(), *self.steps.values(), *self.objects.values()]
        fields = {name for one in made for name in one.fields}
        yield from self._table["words"].keys() - fields
        for name, told in self._table["meanings"].items():
            there = self._structs.found.get(name)
            known = self._structs.fields_of(there) if there is not None else ()
            yield from (f"{name}.{key}" for key in told if key not in known)

    def undescribed(self) -> Iterator[str]:
        """Fields without a meaning."""
        for one in (*self.kinds.values(), *self.steps.values(), *self.objects.values()):
            yield from (f"{one.name}.{key}" for key, told in one.fields.items() if not told.meaning)

    def _object(self, name: str, section: str) -> Object:
        entry = self._table[section][name]
        fields: dict[str, Field] = {}
        optional: frozenset[str] = frozenset()
        if like := entry.get("like"):
            other = self._object(like, section)
            fields, optional = dict(other.fields), other.optional
        if base := entry.get("extends"):
            fields |= self._fields_of_struct(base)
        head = HEAD if section == "kinds" else {}
        told = {**head, **entry.get("fields", {})}
        optional |= {key.removesuffix(_OPTIONAL) for key in told if key.endswith(_OPTIONAL)}
        own = {key.removesuffix(_OPTIONAL): _field(text) for key, text in told.items()}
        commands = tuple(entry.get("commands", ()))
        order = {**{key: own[key] for key in head}, **fields, **own}
        return Object(name, order, entry.get("summary", ""), commands, optional)

    def _step(self, kind: Any) -> Object:  # noqa: ANN401 - a class of steps
        name = self._structs.name_of(kind)
        told = {key: _field(text) for key, text in self._table["steps"].items()}
        return Object(name, {**told, **self._fields_of_struct(name)}, _first(kind.__doc__))

    def _fields_of_struct(self, name: str) -> dict[str, Field]:
        """Its fields, each with a meaning where there is one."""
        kind = self._structs.found[name]
        own, words = self._table.get("meanings", {}).get(name, {}), self._table["words"]
        fields = {
            key: Field(one.type, own.get(key) or _first(one.meaning) or words.get(key, ""))
            for key, one in self._structs.fields_of(kind).items()
        }
        if hasattr(kind, "from_document"):
            fields["kind"] = _field(self._table["steps"]["kind"])
        return fields

    def _reached(self) -> dict[str, Object]:
        """The objects that documents and steps consist of."""
        found: dict[str, Object] = {}
        names = [*_names([*self.kinds.values(), *self.steps.values()])]
        while names:
            name = names.pop()
            if name not in found and (made := self._named(name)) is not None:
                found[name] = made
                names += _names([made])
        return dict(sorted(found.items()))

    def _named(self, name: str) -> Object | None:
        if name in self._table["objects"]:
            return self._object(name, "objects")
        if name in self._structs.found:
            kind = self._structs.found[name]
            return Object(name, self._fields_of_struct(name), _first(kind.__doc__))
        return None

    def faults(self, document: Mapping[str, Any]) -> Iterator[str]:
        """Where a document does not fit what is said of its kind."""
        kind = str(document.get("kind"))
        if kind not in self.kinds:
            yield f"{kind}: no such kind in {TABLE.name}"
        else:
            yield from self._faults_of_object(document, self.kinds[kind], kind)

    def _faults_of_object(self, value: Any, wanted: Object, path: str) -> Iterator[str]:  # noqa: ANN401
        if not isinstance(value, dict):
            yield f"{path}: not an object"
            return
        for key in wanted.fields.keys() - value.keys() - wanted.optional:
            yield f"{path}.{key}: documented, and not there"
        for key, item in value.items():
            if key not in wanted.fields:
                yield f"{path}.{key}: not documented"
            else:
                yield from self._faults(item, wanted.fields[key].type, f"{path}.{key}")

    def _faults(self, value: Any, wanted: Type, path: str) -> Iterator[str]:  # noqa: ANN401
        match wanted.name:
            case "union":
                tries = [list(self._faults(value, part, path)) for part in wanted.parts]
                yield from min(tries, key=len)
            case "list" if isinstance(value, list):
                for item in value:
                    yield from self._faults(item, wanted.parts[0], f"{path}[]")
            case "map" if isinstance(value, dict):
                for item in value.values():
                    yield from self._faults(item, wanted.parts[0], f"{path}.*")
            case "Step" if isinstance(value, dict) and str(value.get("kind")) in self.steps:
                step = self.steps[str(value["kind"])]
                yield from self._faults_of_object(value, step, f"{path}({step.name})")
            case name if name in self.objects:
                yield from self._faults_of_object(value, self.objects[name], path)
            case _:
                yield from _faults_of_scalar(value, wanted, path)


def _is_own(made: type) -> bool:
    """Whether a class is part of the program: others can add steps too."""
    return made.__module__.startswith("vfiomgr.")


def _class(name: str, place: str) -> Any:  # noqa: ANN401 - a class of values
    """The class in a module; `MODULE:CLASS` where documents have another name for it."""
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute or name)


def _faults_of_scalar(value: object, wanted: Type, path: str) -> Iterator[str]:
    kinds = _PYTHON.get(wanted.name, ())
    is_number = wanted.name in ("integer", "number") and not isinstance(value, bool)
    fits = isinstance(value, kinds) and (is_number or int not in kinds)
    if wanted.name not in _ANY and not (fits and value in (wanted.values or (value,))):
        yield f"{path}: {value!r} is not {wanted}"


def _field(text: str) -> Field:
    """A field as documents.toml has it."""
    kind, _, meaning = text.partition(": ")
    return Field(parsed(kind), f"{meaning[:1].upper()}{meaning[1:]}.")


def _first(text: str | None) -> str:
    """The first paragraph of a docstring."""
    paragraph = (text or "").strip().split("\n\n")[0]
    return re.sub(r"\s+", " ", paragraph)


def _names(objects: list[Object]) -> Iterator[str]:
    for one in objects:
        for told in one.fields.values():
            yield from told.type.names()
