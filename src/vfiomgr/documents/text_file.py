"""A file with its path and text."""

from __future__ import annotations

from vfiomgr.value import Value


class TextFile(Value):
    """A small configuration file of the host."""

    path: str
    text: str
