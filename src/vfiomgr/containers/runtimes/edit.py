"""What is to be done to the files of a runtime, before anything is done."""

from __future__ import annotations

from vfiomgr.containers.runtimes import text, values
from vfiomgr.containers.runtimes.model import ConfigFile, Key, OwnedFile, Setting
from vfiomgr.value import Value

HEAD = "# vfiomgr: entries come with `vfiomgr kata install` or `runtime install`, and go with\n"
HEAD += "# `vfiomgr kata uninstall` or `runtime uninstall`.\n"
EMPTY_JSON = "{}\n"


class Edit(Value):
    """Values that a file is to have."""

    file: ConfigFile
    settings: tuple[Setting, ...]
    head: str = ""
    """What a file that is not there yet begins with."""
    block: str | None = None
    """In a template, which holds more than values: the text that is added to it."""

    def made(self) -> OwnedFile:
        """The file as it was and as it is to be.

        Raises:
            InvalidDocument: its text cannot be read.
            Refusal: its text cannot be edited.

        """
        path, before = self.file.path, self.file.text
        start = start_of(before, self.head)
        if self.block is not None:
            return OwnedFile(path, before, joined(start, self.block))
        after = text.with_settings(start, self.settings, path)
        return OwnedFile(path, before, after, values.owned(text.parse(start, path), self.settings))


class Decision(Value):
    """What an entry takes: edits in the order in which none of them does harm without the next."""

    edits: tuple[Edit, ...]
    notes: tuple[str, ...] = ()
    ours: tuple[Key, ...] = ()
    """What the runtime may see otherwise afterwards, with all that is below."""
    expected: tuple[Setting, ...] = ()
    """What the runtime must see afterwards."""


def start_of(before: str | None, head: str) -> str:
    """The text to set values into: that of the file, or the heading of a new file."""
    is_new = before is None or (head == EMPTY_JSON and not before.strip())
    return head if is_new or before is None else before


def joined(start: str, block: str) -> str:
    """A template with a block after all else."""
    gap = "" if not start or start.endswith("\n\n") else "\n" if start.endswith("\n") else "\n\n"
    return f"{start}{gap}{block}"
