"""Values of the model as documents have them: lists, dictionaries and scalars."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

UNFOLDED = 1 << 30
"""The width of YAML: ruamel folds texts with escapes in places where readers add a blank."""
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
