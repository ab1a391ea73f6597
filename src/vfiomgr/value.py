"""What values are made of: structs of msgspec, which cost little to import, make and compare.

They are read from JSON by `vfiomgr.documents.jsonable`. pydantic remains for what people write.
"""

from __future__ import annotations

from typing import dataclass_transform

import msgspec


@dataclass_transform(frozen_default=True, field_specifiers=(msgspec.field,))
class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A frozen value: equal to another one of its class whose fields are equal, and hashable.

    A class with a `cached_property` needs the option `dict=True`.
    """
