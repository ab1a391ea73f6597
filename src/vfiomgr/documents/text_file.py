"""A file by its path, with its text."""

from __future__ import annotations

from vfiomgr.value import Value


class TextFile(Value):
    """A small file of the host's configuration, whole."""

    path: str
    text: str
