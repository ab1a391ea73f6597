"""Regular expressions that are compiled when they are first used.

A command uses a few of those in the modules that it imports; all of them take 10 ms.
"""

from __future__ import annotations

import re
from typing import Any, AnyStr, cast


class _Deferred:
    """Stands for a compiled expression: its methods are looked up once."""

    def __init__(self, *told: Any) -> None:  # noqa: ANN401 - what re.compile takes
        self._told = told

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - what re.Pattern has
        found = getattr(re.compile(*self._told), name)
        setattr(self, name, found)
        return found


def expression(text: AnyStr, flags: int = 0) -> re.Pattern[AnyStr]:
    """A regular expression of a module; use its methods, not the functions of `re`."""
    return cast("re.Pattern[AnyStr]", _Deferred(text, flags))
