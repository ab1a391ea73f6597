"""The base of values: msgspec structs, which are cheap to import, create and compare.

`vfiomgr.documents.jsonable` reads them from JSON. pydantic is used for files that people write.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar, dataclass_transform

import msgspec

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen, hashable value; values of one class with equal fields are equal.

    A class with a `cached_property` needs the option `dict=True`.
    """


def values_by_key(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, tuple[_Value, ...]]:
    """Values by key, in the order of their occurrence."""
    found: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return {key: tuple(values) for key, values in found.items()}
