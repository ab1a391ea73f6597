"""Planned changes to the files of a runtime."""

from __future__ import annotations

from vfiomgr.containers.runtimes import text, values
from vfiomgr.containers.runtimes.model import ConfigFile, Key, OwnedFile, Setting
from vfiomgr.value import Value

HEAD = "# vfiomgr: entries come with `vfiomgr runtime install`, and go with\n"
HEAD += "# `vfiomgr runtime uninstall`.\n"
EMPTY_JSON = "{}\n"


class Edit(Value):
    """Values for a file."""

    file: ConfigFile
    settings: tuple[Setting, ...]
    head: str = ""
    """The heading of a new file."""
    block: str | None = None
    """For a template, which contains more than values: the text to append."""

    def made(self) -> OwnedFile:
        """The file as it was and as it will be.

        Raises:
            InvalidDocument: its text is not readable.
            Refusal: its text is not editable.

        """
        path, before = self.file.path, self.file.text
        start = start_of(before, self.head)
        if self.block is not None:
            return OwnedFile(path, before, joined(start, self.block))
        after = text.with_settings(start, self.settings, path)
        return OwnedFile(path, before, after, values.owned(text.parse(start, path), self.settings))


class Decision(Value):
    """The changes for an entry, in an order that is safe if interrupted."""

    edits: tuple[Edit, ...]
    notes: tuple[str, ...] = ()
    ours: tuple[Key, ...] = ()
    """Keys that the runtime may read differently afterwards, including all keys below."""
    expected: tuple[Setting, ...] = ()
    """What the runtime must read afterwards."""


def start_of(before: str | None, head: str) -> str:
    """The text to set values in: that of the file, or the heading of a new file."""
    is_new = before is None or (head == EMPTY_JSON and not before.strip())
    return head if is_new or before is None else before


def joined(start: str, block: str) -> str:
    """A template with an appended block."""
    gap = "" if not start or start.endswith("\n\n") else "\n" if start.endswith("\n") else "\n\n"
    return f"{start}{gap}{block}"
