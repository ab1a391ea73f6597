"""Entries: what is written for one, and the record of those that vfiomgr added."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from vfiomgr.containers.runtimes.model import ConfigFile, Key, ProgramName, Setting
from vfiomgr.containers.runtimes.text import with_settings
from vfiomgr.documents.jsonable import from_jsonable, to_jsonable
from vfiomgr.documents.text import parse_json
from vfiomgr.errors import InvalidDocument, NeedsRoot
from vfiomgr.paths import STATE
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

RECORD = STATE / "runtimes.json"
_VERSION = "vfiomgr/v2"


class EntryPart(Value):
    """The values of an entry in one file."""

    path: str
    settings: tuple[Setting, ...] = ()
    block: str = ""
    """For a template, which contains more than values: the text to append."""


class InstalledEntry(Value):
    """An entry, with all that was written for it."""

    name: str
    parts: tuple[EntryPart, ...]


class ChangedFile(Value):
    """A file with entries, as if no other program had changed it since the first one."""

    path: str
    head: str
    """The heading of the file if it is new."""
    original: str | None
    """The text without entries; None if the file did not exist."""
    written: str
    """The text with all entries."""
    backup: str | None = None
    made_directory: bool = False
    """Whether its directory was created for it."""


class InstalledRuntime(Value):
    """A container runtime with entries; a host may have two containerds."""

    program: ProgramName
    main: str
    """The runtime's own file."""
    files: tuple[ChangedFile, ...] = ()
    entries: tuple[InstalledEntry, ...] = ()

    def file(self, path: str) -> ChangedFile | None:
        """The record of a file; None if it has no entry."""
        return next((file for file in self.files if file.path == path), None)

    def has_entry(self, name: str) -> bool:
        """Whether vfiomgr added an entry of this name."""
        return any(entry.name == name for entry in self.entries)

    def settings_of(self, names: Collection[str]) -> list[Setting]:
        """The settings of entries, in all their files."""
        found = (entry for entry in self.entries if entry.name in names)
        return [setting for entry in found for part in entry.parts for setting in part.settings]


class _Record(Value):
    """The file with all entries."""

    api_version: str
    kind: str
    runtimes: tuple[InstalledRuntime, ...]


def parts_in(path: str, entries: Iterable[InstalledEntry]) -> list[EntryPart]:
    """The values of entries in a file, in the order in which they were added."""
    return [part for entry in entries for part in entry.parts if part.path == path]


def render_record(installed: Iterable[InstalledRuntime]) -> str | None:
    """The record as a JSON document; None if no entry is left."""
    runtimes = tuple(runtime for runtime in installed if runtime.entries)
    if not runtimes:
        return None
    document = _Record(_VERSION, "InstalledRuntimes", runtimes)
    return json.dumps(to_jsonable(document), indent=2) + "\n"


def parse_record(text: str | None) -> tuple[InstalledRuntime, ...]:
    """Read a record that `render_record` wrote.

    Raises:
        InvalidDocument: it is invalid, or of another version.
    """
    if text is None:
        return ()
    try:
        document = parse_json(text)
        version = document.get("api_version") if isinstance(document, dict) else None
        if version is not None and version != _VERSION:
            message = f"{RECORD} was written by another version of vfiomgr ({version})"
            hint = (
                "remove its entries with that version (vfiomgr runtime uninstall NAME), or edit "
                f"the files that it names and move it away: mv {RECORD} /root/"
            )
            raise InvalidDocument(message, hint)
        record = from_jsonable(_Record, document)
    except (ValueError, RecursionError) as error:
        message = f"{RECORD} is not a valid record of vfiomgr: {error}"
        hint = "restore it from a backup; without it vfiomgr does not know which entries it wrote"
        raise InvalidDocument(message, hint) from None
    return record.runtimes


def text_of_record(tree: HostTree) -> str | None:
    """The text of the record; None if there is none.

    Raises:
        NeedsRoot: only root may read it, because it contains entire files.
    """
    told = tree.read_text(RECORD)
    if told is None and tree.exists(RECORD):
        message = f"reading {RECORD}"
        raise NeedsRoot(message, has_plan=False)
    return told


def runtime_at(
    record: Iterable[InstalledRuntime], program: ProgramName, main: str
) -> InstalledRuntime:
    """The entries in the files of a runtime."""
    found = (one for one in record if (one.program, one.main) == (program, main))
    return next(found, InstalledRuntime(program, main))


def with_runtime(record: Iterable[InstalledRuntime], changed: InstalledRuntime) -> str | None:
    """The text of the record with the present entries of a runtime; None if no entry is left."""
    place = (changed.program, changed.main)
    return render_record((*(one for one in record if (one.program, one.main) != place), changed))


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
