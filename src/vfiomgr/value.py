"""The base of values: msgspec structs, which are cheap to import, create and compare.

`vfiomgr.documents.jsonable` reads them from JSON. pydantic is used for files that people write.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, dataclass_transform

if TYPE_CHECKING:
    import msgspec
else:
    _TYPING = "typing_extensions"
    """msgspec takes type hints from it where it is installed; Python's own do, in 2 ms less."""
    is_free = sys.modules.setdefault(_TYPING, None) is None
    try:
        import msgspec
    finally:
        if is_free:
            del sys.modules[_TYPING]


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen, hashable value; values of one class with equal fields are equal.

    A class with a `cached_property` needs the option `dict=True`.
    """
