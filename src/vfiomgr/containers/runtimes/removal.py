"""Remove entries from files, and keep everything else that is in them.

The record has each file as it was before the first entry. If nothing else was changed since, the
file becomes that text with the remaining entries, so removing the last one restores the original
bytes. Otherwise the same change is made to the present text, as far as it only removes what vfiomgr
wrote.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from msgspec.structs import replace

from vfiomgr.containers.runtimes import text, values
from vfiomgr.containers.runtimes.facts import has_entry
from vfiomgr.containers.runtimes.model import ConfigFile, Setting, absolute, covers, shown
from vfiomgr.containers.runtimes.other_runtimes import BASE, beginning_of
from vfiomgr.containers.runtimes.record import (
    ChangedFile,
    EntryPart,
    InstalledEntry,
    InstalledRuntime,
    parts_in,
    with_parts,
)
from vfiomgr.diagnostic import refuse
from vfiomgr.paths import HostPath
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping


class Removal(Value):
    """The texts of the changed files without the entries, and the record of the others."""

    texts: dict[str, str | None]
    record: InstalledRuntime
    notes: tuple[str, ...] = ()


def remove(
    record: InstalledRuntime,
    names: Collection[str],
    texts: Mapping[str, str | None],
    beside: Collection[HostPath],
    command: str,
) -> Removal:
    """Remove entries from the present texts of their files.

    `beside` are drop-ins of other programs; `command` is the command to run again after a manual
    edit.

    Raises:
        InvalidDocument: a file is not readable.
        Refusal: an entry was changed since, or cannot be removed without losing something else.

    """
    going = [entry for entry in record.entries if entry.name in names]
    staying = [entry for entry in record.entries if entry.name not in names]
    staying = _with_shared_settings(staying, going)
    left: dict[str, str | None] = {}
    files: list[ChangedFile] = []
    notes: list[str] = []
    for file in record.files:
        removed, others = parts_in(file.path, going), parts_in(file.path, staying)
        if not removed:
            files.append(file)
            continue
        current = texts[file.path]
        settings = [setting for part in removed for setting in part.settings]
        needed = [] if others else [*_needed(file, current, settings, beside)]
        kept = EntryPart(file.path, tuple(setting for setting, _ in needed))
        target = with_parts(file.original, file.head, [*others, kept], file.path)
        if others and target is not None:
            files.append(replace(file, written=target))
        notes += [why for _, why in needed]
        if current is None:
            notes.append(f"{file.path} is already removed")
            left[file.path] = None
        elif current == file.written:
            left[file.path] = target
        else:
            taken = [setting for setting in settings if setting not in kept.settings]
            edited = _EditedFile(file, current, target, command)
            left[file.path] = edited.without(taken) if settings else edited.without_block()
            if file.original is None and not others and left[file.path] is not None:
                notes.append(f"{file.path} stays: another program or a person also wrote to it")
            if not settings or not all(one.is_shared for one in settings):
                edited.refuse_remaining(left[file.path], record.program, going)
    made = replace(record, files=tuple(files), entries=tuple(staying))
    return Removal(left, made, tuple(dict.fromkeys(notes)))


def _with_shared_settings(
    staying: list[InstalledEntry], going: Iterable[InstalledEntry]
) -> list[InstalledEntry]:
    """The entries that stay; the first of them gets the settings that all of them need."""
    if not staying:
        return []
    first, *others = staying
    parts = {part.path: part for part in first.parts}
    for part in (part for entry in going for part in entry.parts):
        own = parts.get(part.path, EntryPart(part.path))
        shared = [one for one in part.settings if one.is_shared and one not in own.settings]
        if shared:
            parts[part.path] = replace(own, settings=(*shared, *own.settings))
    return [replace(first, parts=tuple(parts.values())), *others]


def _needed(
    file: ChangedFile,
    current: str | None,
    settings: Iterable[Setting],
    beside: Collection[HostPath],
) -> Iterator[tuple[Setting, str]]:
    """The shared settings that stay after the last entry, each with the reason."""
    shared = [setting for setting in settings if setting.is_shared]
    if current is None or not shared:
        return
    data, written = text.parse(current, file.path), text.parse(file.written, file.path)
    original = text.parse(file.original or "", file.path)
    ours = {setting.key for setting in settings}
    for setting in shared:
        name = shown(setting.key)
        if values.is_edited(data, setting, written, original):
            yield setting, f"{name} in {file.path} stays: it was changed since"
        elif users := _runtimes_beside(data, setting, ours):
            named = ", ".join(users)
            yield (
                setting,
                f"{name} in {file.path} stays: without it containerd would only have {named}",
            )
        elif users := _imported_by(setting, file, beside):
            named = ", ".join(users)
            yield (
                setting,
                f"{name} in {file.path} keeps {setting.value}, which also imports {named}",
            )


def _runtimes_beside(data: values.Data, runc: Setting, ours: Collection[object]) -> list[str]:
    """Runtimes of other programs in the table where runc was added, which it still needs."""
    around = values.found(data, runc.key[:-1])
    if not isinstance(runc.value, dict) or not isinstance(around, dict):
        return []
    return [name for name in around if (*runc.key[:-1], name) not in ours]


def _imported_by(setting: Setting, file: ChangedFile, beside: Iterable[HostPath]) -> list[str]:
    """Files of other programs that an import matches."""
    if not setting.is_item:
        return []
    pattern = absolute(setting.value, file.path)
    return [str(path) for path in beside if covers(pattern, path)]


class _EditedFile(Value):
    """A file that another program changed since vfiomgr wrote it."""

    file: ChangedFile
    current: str
    target: str | None
    """The text that it would become otherwise."""
    command: str

    def without(self, taken: Collection[Setting]) -> str | None:
        """The text without settings; None if nothing is left of a file that vfiomgr created."""
        path = self.file.path
        data = text.parse(self.current, path)
        written, target = text.parse(self.file.written, path), text.parse(self.target or "", path)
        for setting in taken:
            if not setting.is_shared and values.is_edited(data, setting, written, target):
                self._refuse_edited(setting, values.found(data, setting.key))
        wanted = values.merge(data, taken, written, target)
        merged = text.merge(self.current, self.file.written, self.target or "")
        return self._unless_bare(text.with_values(self.current, wanted, merged, taken, path))

    def _unless_bare(self, left: str) -> str | None:
        """The text; None if nothing but the heading is left of a file that vfiomgr created."""
        is_bare = left.strip() in ("", self.file.head.strip())
        return None if self.file.original is None and is_bare else left

    def _refuse_edited(self, setting: Setting, current: object) -> NoReturn:
        path, key = self.file.path, shown(setting.key)
        below, before, there = values.first_difference(setting.value, current)
        changed = shown((*setting.key, *below))
        message = (
            f"{changed} in {path} was changed since: it is {there}, but vfiomgr wrote {before}"
        )
        hint = f"restore it, or remove {key} from the file manually; then run {self.command} again"
        refuse("runtime-entry-changed", path, message, hint)

    def without_block(self) -> str | None:
        """A template without the appended text; unchanged if the lines are not found."""
        left = text.merge(self.current, self.file.written, self.target or self.file.head)
        return self.current if left is None else self._unless_bare(left)

    def refuse_remaining(
        self, left: str | None, program: str, going: Iterable[InstalledEntry]
    ) -> None:
        """Refuse if the text still has an entry, e.g. below another name of the plugin."""
        found = ConfigFile(HostPath(self.file.path), left)
        for name in (entry.name for entry in going if has_entry(found, program, entry.name)):
            message = f"entry {name} in {self.file.path} was changed since vfiomgr wrote it"
            lines = f"`{beginning_of(name).strip()}`"
            block = f", including its lines {lines}" if self.file.head == BASE else ""
            hint = f"remove it manually{block}; then run {self.command} again"
            refuse("runtime-entry-changed", self.file.path, message, hint)
