"""Types of JSON, read from the annotations of our values: one form for the page and for tests."""

from __future__ import annotations

import ast
import collections.abc
import inspect
import sys
import types
import typing
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from vfiomgr.engine.plan import Request, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean", object: "any"}
_LISTS = (tuple, list, set, frozenset, collections.abc.Sequence)
_MAPS = (dict, collections.abc.Mapping)


@dataclass(frozen=True)
class Type:
    """A type: a plain one or an object by its name, a list, a map, or one of several."""

    name: str
    """`string`, `null`, `Bar`; `list`, `map` and `union` have parts."""
    parts: tuple[Type, ...] = ()
    values: tuple[object, ...] = ()
    """All values that it can have, where these are few."""

    def __str__(self) -> str:
        """As the page has it: `list of Bar`, `string or null`."""
        if self.values:
            return " or ".join(f"`{value}`" for value in self.values)
        joined = " or ".join(map(str, self.parts))
        return {"list": f"list of {joined}", "map": f"map of {joined}"}.get(
            self.name, joined or self.name
        )

    def names(self) -> Iterator[str]:
        """The names of plain types and objects in it."""
        if self.parts:
            for part in self.parts:
                yield from part.names()
        else:
            yield self.name


@dataclass(frozen=True)
class Field:
    """A field of an object."""

    type: Type
    meaning: str


@dataclass
class Structs:
    """The values that were met, by the names that the page has for them."""

    found: dict[str, type[msgspec.Struct]] = field(default_factory=dict)

    def type_of(self, hint: Any) -> Type:  # noqa: ANN401 - annotations have no narrower type
        """The type of JSON that a value of an annotation becomes (`to_jsonable`)."""
        origin, parts = typing.get_origin(hint), typing.get_args(hint)
        if hint in (None, type(None)):
            return Type("null")
        if origin is typing.Literal:
            return Type("string", values=parts)
        if origin in (typing.Union, types.UnionType):
            return _union(tuple(map(self.type_of, parts)))
        if origin in _LISTS:
            kinds = tuple(dict.fromkeys(self.type_of(part) for part in parts if part is not ...))
            return Type("list", (kinds[0] if len(kinds) == 1 else _union(kinds),))
        if origin in _MAPS:
            return Type("map", (self.type_of(parts[1]),))
        return self._class(hint)

    def _class(self, kind: Any) -> Type:  # noqa: ANN401
        if kind in _PLAIN:
            return Type(_PLAIN[kind])
        if kind in (Step, Request):
            return Type(kind.__name__)
        if getattr(kind, "is_text_in_documents", False) or issubclass(kind, str):
            return Type("string")
        if issubclass(kind, msgspec.Struct):
            return Type(self.name_of(kind))
        if hasattr(kind, "model_validate"):
            return Type("layout document")
        message = f"{kind} is no type of documents"
        raise TypeError(message)

    def name_of(self, kind: type[msgspec.Struct]) -> str:
        """The name of a value; its package tells it from others of that name."""
        for name, known in self.found.items():
            if known is kind:
                return name
        name = kind.__name__
        if name in self.found:
            name = f"{kind.__module__.split('.')[1].capitalize()}{name}"
        if self.found.setdefault(name, kind) is not kind:
            message = f"{kind.__module__}.{kind.__name__} needs a name of its own in [structs]"
            raise ValueError(message)
        return name

    def fields_of(self, kind: type[msgspec.Struct]) -> dict[str, Field]:
        """The fields of a value, with what its class says of them; those of facets like its own."""
        hints = _hints(kind)
        said = _docstrings(kind)
        fields: dict[str, Field] = {}
        for name, key in zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True):
            if name in getattr(kind, "facets", ()):
                fields |= self.fields_of(hints[name])
            else:
                fields[key] = Field(self.type_of(hints[name]), said.get(name, ""))
        return fields


def _union(parts: tuple[Type, ...]) -> Type:
    flat = [inner for part in parts for inner in (part.parts if part.name == "union" else (part,))]
    return Type("union", tuple(dict.fromkeys(flat)))


def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The annotations of a class and its bases."""
    hints: dict[str, Any] = {}
    for base in _bases(kind):
        names = _names_in(base.__module__)
        for name, text in inspect.get_annotations(base).items():
            if "ClassVar" not in str(text):
                hints[name] = eval(text, names) if isinstance(text, str) else text  # noqa: S307 - ours
    return hints


def _bases(kind: type[msgspec.Struct]) -> Iterator[type]:
    return (base for base in reversed(kind.__mro__) if base.__module__.startswith("vfiomgr"))


@cache
def _names_in(module: str) -> dict[str, Any]:
    """The names in a module, with those that it imports below `if TYPE_CHECKING`."""
    names = dict(vars(sys.modules[module]))
    for node in _tree(module).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            code = compile(ast.Module(node.body, []), module, "exec")
            exec(code, names)  # noqa: S102 - imports of our own
    return names


def _docstrings(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The texts below the fields of a class and its bases."""
    found: dict[str, str] = {}
    for base in _bases(kind):
        for node in _tree(base.__module__).body:
            if isinstance(node, ast.ClassDef) and node.name == base.__name__:
                found |= _field_docstrings(node)
    return found


def _field_docstrings(node: ast.ClassDef) -> dict[str, str]:
    pairs = zip(node.body, node.body[1:], strict=False)
    return {
        first.target.id: inspect.cleandoc(str(second.value.value))
        for first, second in pairs
        if isinstance(first, ast.AnnAssign)
        and isinstance(first.target, ast.Name)
        and isinstance(second, ast.Expr)
        and isinstance(second.value, ast.Constant)
    }


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(inspect.getsource(sys.modules[module]))


def parsed(text: str) -> Type:
    """A type as documents.toml has it: `list[Bar] | None`, `dict[str, int]`, `str`."""
    return _parsed(ast.parse(text, mode="eval").body)


def _parsed(node: ast.expr) -> Type:  # noqa: PLR0911 - one for each form
    match node:
        case ast.Constant(value=None):
            return Type("null")
        case ast.Name(id="str" | "int" | "float" | "bool" | "object" as name):
            return Type(_PLAIN[{kind.__name__: kind for kind in _PLAIN}[name]])
        case ast.Name(id=name):
            return Type(name)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _union((_parsed(left), _parsed(right)))
        case ast.Subscript(value=ast.Name(id="list"), slice=part):
            return Type("list", (_parsed(part),))
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, part])):
            return Type("map", (_parsed(part),))
        case ast.Subscript(value=ast.Name(id="Literal"), slice=part):
            values = part.elts if isinstance(part, ast.Tuple) else [part]
            return Type("string", values=tuple(map(ast.literal_eval, values)))
    message = f"{ast.unparse(node)} is no type of documents"
    raise ValueError(message)
