"""The base of values: msgspec structs, which are cheap to import, create and compare.

`vfiomgr.documents.jsonable` reads them from JSON. pydantic is used for files that people write.
"""

from __future__ import annotations

from typing import dataclass_transform

import msgspec


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen, hashable value; values of one class with equal fields are equal.

    A class with a `cached_property` needs the option `dict=True`.
    """
