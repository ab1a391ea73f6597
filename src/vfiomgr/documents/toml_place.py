"""Where a text is no TOML."""

from __future__ import annotations

import re

_LINE = re.compile(r"\(at line (\d+)")


def line_of(error: ValueError, text: str) -> int:
    """Where it is wrong; the last line that has something, where only the end shows it."""
    told = _LINE.search(str(error))
    return int(told[1]) if told else max(len(text.rstrip().splitlines()), 1)
