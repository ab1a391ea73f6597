"""Remove the values of one of several entries from a file, as if it had never been written.

The record of each entry has the file before and after it. If no other program changes the file,
these form a chain from the first text to the present one, so the other entries can be written again
from the first text on: removing the last entry restores the original bytes.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.containers.runtimes import other_runtimes, text, values
from vfiomgr.containers.runtimes.model import (
    InstalledRuntime,
    OwnedFile,
    OwnedKey,
    Setting,
    absolute,
    covers,
    shown,
)
from vfiomgr.containers.runtimes.text import EMPTY_JSON, HEAD, start_of
from vfiomgr.errors import InvalidDocument, Refusal
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vfiomgr.paths import HostPath

    _Link = tuple[InstalledRuntime, OwnedFile]


class Replayed(Value):
    """The text of a file without an entry, and the new record of the others."""

    text: str | None
    others: tuple[InstalledRuntime, ...]


def replayed(
    entry: InstalledRuntime, path: str, others: tuple[InstalledRuntime, ...], current: str
) -> Replayed | None:
    """A file without an entry, if there are others of the same runtime.

    Values that the others also need are passed to the first of them. None if there is no other, the
    file was changed by another program, or it cannot be written again.
    """
    heirs = [one for one in others if one.is_beside(entry)]
    chain = _chain([entry, *heirs], path, current)
    if not heirs or not chain:
        return None
    left = [(one, part) for one, part in chain if one is not entry]
    gone = [part for one, part in chain if one is entry]
    shared = [key for part in gone for key in part.keys if key.is_shared]
    if not left and shared:
        left = [(heirs[0], replace(gone[0], keys=()))]
    try:
        parts = _written(chain[0][1].before, left, shared)
    except (InvalidDocument, Refusal):
        return None
    made = tuple(_with_parts(one, path, parts) for one in others)
    return Replayed(parts[-1][1].after if parts else chain[0][1].before, made)


def _chain(entries: Iterable[InstalledRuntime], path: str, current: str) -> list[_Link]:
    """What each entry made of a file, in order; empty if a link is missing."""
    loose = [(one, part) for one in entries for part in one.files if part.path == path]
    chain: list[_Link] = []
    now: str | None = current
    while loose:
        found = next((link for link in loose if link[1].after == now), None)
        if found is None:
            return []
        chain.insert(0, found)
        loose.remove(found)
        now = found[1].before
    return chain


def _written(before: str | None, links: Iterable[_Link], shared: Iterable[OwnedKey]) -> list[_Link]:
    """The same entries written again from another text on; the first also gets shared values."""
    made: list[_Link] = []
    for one, part in links:
        known = {(key.path, key.value if key.is_item else "") for key in part.keys}
        passed_on = [k for k in shared if (k.path, k.value if k.is_item else "") not in known]
        settings = [_setting(key) for key in (*passed_on, *part.keys)]
        start = start_of(before, EMPTY_JSON if text.is_json(part.after, part.path) else HEAD)
        after = text.with_settings(start, settings, part.path)
        keys = values.owned(text.parse(start, part.path), settings)
        made.append((one, replace(part, before=before, after=after, keys=keys)))
        before, shared = after, ()
    return made


def _setting(key: OwnedKey) -> Setting:
    return Setting(key.path, json.loads(key.value), key.is_item, key.is_shared)


def _with_parts(one: InstalledRuntime, path: str, parts: Iterable[_Link]) -> InstalledRuntime:
    """The record of an entry with its present changes to a file."""
    own = tuple(part for owner, part in parts if owner is one)
    if not own:
        return one
    return replace(one, files=(*(file for file in one.files if file.path != path), *own))


class Removal(Value):
    """The texts of an entry's files without it, and the new record of the others."""

    texts: dict[str, str | None]
    others: tuple[InstalledRuntime, ...]
    notes: tuple[str, ...]


class _Keys(Value):
    """What happens to the keys of a file."""

    taken: tuple[OwnedKey, ...]
    handed: tuple[OwnedKey, ...]
    left: tuple[str, ...]
    """Why some stay."""


def remove(
    entry: InstalledRuntime,
    others: Iterable[InstalledRuntime],
    texts: Mapping[str, str | None],
    beside: Iterable[HostPath],
    command: str,
) -> Removal:
    """Remove an entry from the present texts of its files.

    `beside` are drop-ins of other programs; `command` is the command to run again after a manual
    edit.

    Raises:
        InvalidDocument: a file is not readable.
        Refusal: the entry was changed since.

    """
    others = tuple(others)
    heir = next((one for one in others if one.is_beside(entry)), None)
    left = dict(texts)
    notes: list[str] = []
    handed: list[OwnedFile] = []
    for file in entry.files:
        current = left.get(file.path)
        if current is None:
            notes.append(f"{file.path} is already removed")
            continue
        if not file.keys:
            left[file.path] = other_runtimes.without_block(current, file, entry.name, command)
            others = _rebased(others, entry, file, ())
            continue
        made = replayed(entry, file.path, others, current)
        if made is not None:
            left[file.path], others = made.text, made.others
            continue
        data = text.parse(current, file.path)
        file, others = _without_superseded(data, entry, file, others)  # noqa: PLW2901
        values.refuse_edited(data, file.keys, file.path, command)
        keys = _sorted_out(data, file, beside, has_heir=heir is not None)
        notes += keys.left
        handed += [_part(file, keys.handed)] if keys.handed else []
        left[file.path] = text.without_file(current, file, keys.taken)
        others = _rebased(others, entry, file, keys.taken)
    heir = next((one for one in others if one.is_beside(entry)), None)
    if heir is not None and handed:
        grown = replace(heir, files=(*heir.files, *handed))
        others = tuple(grown if one is heir else one for one in others)
    return Removal(left, others, tuple(dict.fromkeys(notes)))


def _without_superseded(
    data: values.Data,
    entry: InstalledRuntime,
    file: OwnedFile,
    others: tuple[InstalledRuntime, ...],
) -> tuple[OwnedFile, tuple[InstalledRuntime, ...]]:
    """A file without values that a later entry replaced, and what that entry replaced instead.

    Two entries may have become the default one after the other.
    """
    replaced = {
        own.path: own.before
        for own in file.keys
        if not own.is_item
        and not values.is_there(data, own)
        and any(
            key.path == own.path and values.is_there(data, key)
            for one in others
            if one.is_beside(entry)
            for part in one.files
            for key in part.keys
            if part.path == file.path
        )
    }

    def passed_on(part: OwnedFile) -> OwnedFile:
        if part.path != file.path:
            return part
        keys = (
            replace(key, before=replaced[key.path]) if key.path in replaced else key
            for key in part.keys
        )
        return replace(part, before=_earlier(part.before, file, gone), keys=tuple(keys))

    gone = tuple(key for key in file.keys if key.path in replaced)
    kept = replace(file, keys=tuple(key for key in file.keys if key.path not in replaced))
    if not replaced:
        return file, others
    return kept, tuple(
        replace(one, files=tuple(map(passed_on, one.files))) if one.is_beside(entry) else one
        for one in others
    )


def _earlier(before: str | None, file: OwnedFile, superseded: tuple[OwnedKey, ...]) -> str | None:
    """The text that an entry found, without the value of an earlier entry that it replaced."""
    try:
        return before if before is None else text.without_file(before, file, superseded)
    except Refusal:
        return before  # the keys themselves know what they replaced


def _rebased(
    others: tuple[InstalledRuntime, ...],
    entry: InstalledRuntime,
    file: OwnedFile,
    taken: tuple[OwnedKey, ...],
) -> tuple[InstalledRuntime, ...]:
    """The record of later entries, as if the removed one had never been there.

    Otherwise the last of them would not know that the file was created for the first.
    """

    def without(told: str | None) -> str | None:
        if told is None:
            return None
        if file.keys:
            return text.without_file(told, file, taken) if taken else told
        return other_runtimes.without_block(told, file, entry.name, "")

    def rebased(later: OwnedFile) -> OwnedFile:
        if later.path != file.path:
            return later
        try:
            after = without(later.after)
            return (
                later
                if after is None
                else replace(later, before=without(later.before), after=after)
            )
        except Refusal:
            return later  # what it says of before is as good as it was

    return tuple(
        replace(one, files=tuple(map(rebased, one.files))) if one.is_beside(entry) else one
        for one in others
    )


def _sorted_out(
    data: values.Data, file: OwnedFile, beside: Iterable[HostPath], *, has_heir: bool
) -> _Keys:
    taken: list[OwnedKey] = []
    handed: list[OwnedKey] = []
    left: list[str] = []
    for key in file.keys:
        if key.is_shared and has_heir:
            handed.append(key)
        elif key.is_shared and values.is_edited(data, key):
            left.append(f"{shown(key.path)} in {file.path} stays: it was changed since")
        elif key.is_shared and (users := _needing(data, file, key)):
            left.append(
                f"{shown(key.path)} in {file.path} stays: without it containerd would only have "
                f"{', '.join(users)}"
            )
        elif key.is_item and (users := _brought_in(key, file, beside)):
            left.append(
                f"{shown(key.path)} in {file.path} keeps {json.loads(key.value)}, which also "
                f"imports {', '.join(users)}"
            )
        else:
            taken.append(key)
    return _Keys(tuple(taken), tuple(handed), tuple(left))


def _needing(data: values.Data, file: OwnedFile, key: OwnedKey) -> list[str]:
    """Runtimes of other programs in the table where runc was added, which it still needs."""
    if not isinstance(json.loads(key.value), dict):
        return []
    ours = {own.path for own in file.keys}
    around = values.found(data, key.path[:-1])
    names = around if isinstance(around, dict) else {}
    return [name for name in names if (*key.path[:-1], name) not in ours]


def _brought_in(key: OwnedKey, file: OwnedFile, beside: Iterable[HostPath]) -> list[str]:
    """Files of other programs that the import matches."""
    pattern = absolute(json.loads(key.value), file.path)
    return [path for path in beside if covers(pattern, path)]


def _part(file: OwnedFile, keys: tuple[OwnedKey, ...]) -> OwnedFile:
    """A file as if only these keys had been written into it."""
    settings = [Setting(key.path, json.loads(key.value), key.is_item) for key in keys]
    after = text.with_settings(file.before or "", settings, file.path)
    return replace(file, after=after, keys=keys)
