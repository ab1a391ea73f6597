"""Values of the model in documents: lists, dictionaries and scalars."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import Any, TypeVar

import msgspec

from vfiomgr.expressions import expression

UNFOLDED = 1 << 30
"""The width for YAML: ruamel would fold texts with escapes where readers add a space."""
API_VERSION = "vfiomgr/v1"
_T = TypeVar("_T")
_PLACE = expression(r"(.*) - at `\$(.*)`", re.DOTALL)
_KEY = expression(r"\.(\w+)|\[(\d+)\]")
_FIELD = expression(r"Object (?:contains (unknown)|missing required) field `(.*)`", re.DOTALL)
"""How msgspec reports extra and missing fields: the place is that of the object."""


class Misfit(ValueError):  # noqa: N818 - said of a document
    """A document without the fields of a value; `keys` lead to the wrong place."""

    def __init__(self, what: str, keys: tuple[str | int, ...]) -> None:
        super().__init__(f"{'.'.join(map(str, keys))}: {what}" if keys else what)
        self.what = what
        self.keys = keys


def wrong_version(found: object) -> str:
    """The error for an api_version that this version does not read; None where it is missing."""
    if found is None:
        return f"missing key: api_version (must be {API_VERSION!r})"
    what = f"unsupported api_version {found!r}" if isinstance(found, str) else "wrong api_version"
    return f"{what}, expected {API_VERSION!r}"


def to_jsonable(value: object) -> Any:  # noqa: ANN401 - JSON has no narrower type
    """A value of the model as lists, dictionaries and scalars, in the order of its fields."""
    if isinstance(value, str) or getattr(value, "is_text_in_documents", False):
        return str(value)  # of a HostPath too, which YAML would not know
    if (names := field_names(value)) is not None:
        fields = {name: to_jsonable(getattr(value, name)) for name in names}
        has_kinds = hasattr(value, "from_document")  # a step or a request
        return {**fields, "kind": value.kind} if has_kinds else fields  # type: ignore[attr-defined]
    if hasattr(value, "model_dump"):  # a document that pydantic has read
        return value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if isinstance(value, dict):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item) for item in value]
    return value


def field_names(value: object) -> tuple[str, ...] | None:
    """The fields of a value in order; None if it is not a value with fields."""
    names: tuple[str, ...] | None = getattr(value, "__struct_fields__", None)
    return None if isinstance(value, type) else names


def from_jsonable(kind: type[_T], data: object) -> _T:
    """Read the output of `to_jsonable` for a value.

    Types of its fields that its module does not import are found by `deferred_types` of its class.

    Raises:
        Misfit: the fields are not those of the class; names the first wrong one.
    """
    for one in kind.__mro__:
        for name, module in vars(one).get("deferred_types", {}).items():
            setattr(sys.modules[one.__module__], name, getattr(import_module(module), name))
    try:
        return msgspec.convert(data, kind, dec_hook=_read_text)
    except msgspec.ValidationError as error:
        found = _PLACE.fullmatch(str(error))
        what, place = (found[1], found[2]) if found else (str(error), "")
        keys = tuple(name or int(index) for name, index in _KEY.findall(place))
        if field := _FIELD.fullmatch(what):
            what = "unknown field" if field[1] else "the field is missing"
            keys = (*keys, field[2])
        raise Misfit(what, keys) from None


def _read_text(kind: type[Any], value: object) -> object:
    """Read what msgspec does not support: addresses, paths, steps, models of pydantic."""
    if hasattr(kind, "from_document"):
        return kind.from_document(value)
    if hasattr(kind, "model_validate"):
        return _read_model(kind, value)
    if not isinstance(value, str):
        message = f"Expected `str`, got `{type(value).__name__}`"
        raise ValueError(message)  # noqa: TRY004 - a wrong document, not a wrong argument
    return kind(value)


def _read_model(kind: type[Any], value: object) -> object:
    from pydantic import ValidationError  # noqa: PLC0415 - slow, and few documents are its

    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ValueError(message) from None
