"""A file by its path, with its text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TextFile:
    """A small file of the host's configuration, whole."""

    path: str
    text: str
