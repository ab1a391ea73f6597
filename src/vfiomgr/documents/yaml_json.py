"""Documents as text: JSON, or YAML 1.2."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

from vfiomgr.documents.parsed import TOO_LARGE, parse_json, require_sane, require_shallow
from vfiomgr.errors import InvalidDocument

_OPENS_JSON = ("{", "[")
_DIGITS = "for integer string conversion"
"""What int() says of more digits than it converts."""


def parse_document(text: str, source: str, remedy: str) -> Any:  # noqa: ANN401 - as JSON has it
    """What a text says: JSON where it begins as JSON does, else YAML.

    Raises:
        InvalidDocument: it is neither; the message names `source` and the place in it.

    """
    read = _json if text.lstrip().startswith(_OPENS_JSON) else _yaml
    try:
        return read(text)
    except RecursionError:
        why = "it is nested too deeply"
    except ValueError as error:
        why = str(error)
    message = f"{source}: {why}"
    raise InvalidDocument(message, remedy)


def _json(text: str) -> Any:  # noqa: ANN401 - as JSON has it
    try:
        return parse_json(text)
    except ValueError as error:
        message = f"not JSON: {error}"
        raise ValueError(message) from None


def _yaml(text: str) -> Any:  # noqa: ANN401 - as JSON has it
    from ruamel.yaml import YAML  # noqa: PLC0415 - slow, and few documents are YAML
    from ruamel.yaml.error import YAMLError  # noqa: PLC0415

    require_shallow(text)
    try:
        document = YAML(typ="safe", pure=True).load(text)
    except (YAMLError, ValueError, LookupError) as error:  # the last of tags that lie
        message = f"not YAML: {_place(error)}"
        raise ValueError(message) from None
    require_sane(document, len(text))
    return document


def _place(error: Exception) -> str:
    """What is wrong and where, in one line; a scalar that fits no type of YAML has no place."""
    if _DIGITS in str(error):
        return TOO_LARGE
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or " ".join(str(error).split())
    return problem if mark is None else f"{problem}: line {mark.line + 1} column {mark.column + 1}"


API_VERSION = "vfiomgr/v1"


def to_jsonable(value: object) -> Any:  # noqa: ANN401 - JSON has no narrower type
    """A value of the model as lists, dictionaries and scalars, in the order of its fields."""
    if isinstance(value, str) or getattr(value, "is_text_in_documents", False):
        return str(value)  # of a HostPath too, which YAML would not know
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_jsonable(getattr(value, name)) for name in _field_names(type(value))}
    if hasattr(value, "model_dump"):  # a document that pydantic has read
        return value.model_dump(mode="json", by_alias=True, exclude_unset=True)
    if isinstance(value, dict):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_jsonable(item) for item in value]
    return value


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
