"""The changes for an entry: values for files, and blocks for templates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.containers.runtimes.model import ConfigFile, Key, Setting
from vfiomgr.containers.runtimes.record import EntryPart
from vfiomgr.containers.runtimes.text import with_settings
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

HEAD = "# vfiomgr: entries come with `vfiomgr runtime install`, and go with\n"
HEAD += "# `vfiomgr runtime uninstall`.\n"
EMPTY_JSON = "{}\n"


class Edit(Value):
    """Values for a file, or a block for a template."""

    file: ConfigFile
    settings: tuple[Setting, ...]
    head: str = ""
    """The heading of a new file."""
    block: str = ""

    @property
    def text(self) -> str:
        """The file with the values.

        Raises:
            InvalidDocument: its text is not readable.
            Refusal: its text is not editable.

        """
        made = with_parts(self.file.text, self.head, [self.part], self.file.path)
        return made or ""

    @property
    def part(self) -> EntryPart:
        """What the edit adds to the file."""
        return EntryPart(self.file.path, self.settings, self.block)


class Decision(Value):
    """The changes for an entry, in an order that is safe if interrupted."""

    edits: tuple[Edit, ...]
    notes: tuple[str, ...] = ()
    ours: tuple[Key, ...] = ()
    """Keys that the runtime may read differently afterwards, including all keys below."""
    expected: tuple[Setting, ...] = ()
    """What the runtime must read afterwards."""


def with_parts(
    original: str | None, head: str, parts: Iterable[EntryPart], place: str
) -> str | None:
    """A file with the values of entries, one after the other; without any it is the original.

    Raises:
        InvalidDocument: its text is not readable.
        Refusal: its text is not editable.

    """
    parts = [part for part in parts if part.settings or part.block]
    if not parts:
        return original
    is_new = original is None or (head == EMPTY_JSON and not original.strip())
    text = head if is_new or original is None else original
    for part in parts:
        text = (
            _joined(text, part.block) if part.block else with_settings(text, part.settings, place)
        )
    return text


def _joined(start: str, block: str) -> str:
    """A template with an appended block."""
    gap = "" if not start or start.endswith("\n\n") else "\n" if start.endswith("\n") else "\n\n"
    return f"{start}{gap}{block}"
