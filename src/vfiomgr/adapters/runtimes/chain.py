"""A file with the values of several entries, as if one of them had never been written.

Each entry's record has the file before and after it. While nobody else changes the file, these form
a chain from the first text to the present one, so that the other entries can be written again from
the first text on: the one that is removed last gives back its bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vfiomgr.adapters.runtimes import text, values
from vfiomgr.adapters.runtimes.edit import EMPTY_JSON, HEAD, start_of
from vfiomgr.errors import InvalidDocument, Refusal
from vfiomgr.model.runtime import InstalledRuntime, OwnedFile, Setting

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.model.runtime import OwnedKey

    _Link = tuple[InstalledRuntime, OwnedFile]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The text of a file without an entry, and the record of the others."""

    text: str | None
    others: tuple[InstalledRuntime, ...]


def replayed(
    entry: InstalledRuntime, path: str, others: tuple[InstalledRuntime, ...], current: str
) -> Replayed | None:
    """A file without an entry, where there are others of the same runtime.

    Values that the others need as well are passed on to the first of them. None where there is no
    other, somebody else changed the file, or it cannot be written again.
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
    """What each entry made of a file, the first first; nothing where a link is missing."""
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
    """The same entries one after another from another text on; the first has shared values too."""
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
    """The record of an entry with what it makes of a file now."""
    own = tuple(part for owner, part in parts if owner is one)
    if not own:
        return one
    return replace(one, files=(*(file for file in one.files if file.path != path), *own))
