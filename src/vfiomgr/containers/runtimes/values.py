"""Find, set and remove values in documents by key, without regard to their text."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from vfiomgr.containers.runtimes.model import OwnedKey, Setting, shown
from vfiomgr.diagnostic import refuse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.containers.runtimes.model import Key

Data = dict[str, Any]
ABSENT = object()
"""What `found` returns for a missing value; null is a value."""


def found(data: Any, key: Key) -> Any:  # noqa: ANN401 - documents hold anything
    """The value of a key, or ABSENT."""
    for name in key:
        if not isinstance(data, dict) or name not in data:
            return ABSENT
        data = data[name]
    return data


def with_settings(data: Data, settings: Iterable[Setting]) -> Data:
    """The same document with values set, and missing tables created."""
    result = copy.deepcopy(data)
    for setting in settings:
        *tables, last = setting.key
        inner = result
        for name in tables:
            if inner.get(name) is None:  # null, of JSON, is none
                inner[name] = {}
            inner = inner[name]
        if setting.is_item:
            inner[last] = [*inner.get(last, []), setting.value]
        else:
            inner[last] = copy.deepcopy(setting.value)
    return result


def owned(data: Data, settings: Iterable[Setting]) -> tuple[OwnedKey, ...]:
    """The planned values of a document, with the values that they replace."""
    keys: list[OwnedKey] = []
    for setting in settings:
        before = found(data, setting.key)
        text = None if before is ABSENT else json.dumps(before)
        value = json.dumps(setting.value)
        keys.append(OwnedKey(setting.key, value, text, setting.is_item, setting.is_shared))
    return tuple(keys)


def without_keys(data: Data, keys: Iterable[OwnedKey], before: Data) -> Data:
    """The same document as if the values had never been set.

    Tables that were created for them are removed too if they are empty.
    """
    result = copy.deepcopy(data)
    for key in keys:
        _take_out(result, key, before)
    return result


def _take_out(data: Data, key: OwnedKey, before: Data) -> None:
    *tables, last = key.path
    chain = [data]
    for name in tables:
        inner = chain[-1].get(name)
        if not isinstance(inner, dict):
            return
        chain.append(inner)
    if last not in chain[-1]:
        return
    left = remaining(chain[-1][last], key)
    if left is not ABSENT:
        chain[-1][last] = left
        return
    del chain[-1][last]
    for depth in range(len(tables), 0, -1):
        if chain[depth] or found(before, tuple(tables[:depth])) is not ABSENT:
            return
        del chain[depth - 1][tables[depth - 1]]


def remaining(current: Any, key: OwnedKey) -> Any:  # noqa: ANN401 - documents hold anything
    """What remains after a value is removed; ABSENT if nothing does."""
    if key.is_item:
        left = [item for item in current if item != json.loads(key.value)]
        return left if left or key.before is not None else ABSENT
    return ABSENT if key.before is None else json.loads(key.before)


def is_there(data: Data, key: OwnedKey) -> bool:
    """Whether exactly the written value is there."""
    current, wanted = found(data, key.path), json.loads(key.value)
    if key.is_item:
        return isinstance(current, list) and wanted in current
    return bool(current == wanted)


def is_edited(data: Data, key: OwnedKey) -> bool:
    """Whether the value was changed since; a removed value was not."""
    current = found(data, key.path)
    if current is ABSENT or key.is_item or is_there(data, key):
        return False
    return key.before is None or bool(current != json.loads(key.before))


def refuse_edited(data: Data, keys: Iterable[OwnedKey], place: str, command: str) -> None:
    """Make sure that the values of this entry were not changed."""
    for key in keys:
        if key.is_shared or not is_edited(data, key):
            continue
        current = found(data, key.path)
        changed, written, there = next(_differences(key.path, json.loads(key.value), current))
        message = (
            f"{shown(changed)} in {place} was changed since: it is {_told(there)}, but vfiomgr "
            f"wrote {_told(written)}"
        )
        hint = (
            f"restore it, or remove {shown(key.path)} from the file manually; then run {command} "
            "again"
        )
        refuse("runtime-entry-changed", place, message, hint)


def _told(value: Any) -> str:  # noqa: ANN401
    return "nothing" if value is ABSENT else json.dumps(value)


def _differences(key: Key, one: Any, other: Any) -> Iterator[tuple[Key, Any, Any]]:  # noqa: ANN401
    """The keys below a key whose values differ, with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in dict.fromkeys((*one, *other)):
            yield from _differences((*key, name), one.get(name, ABSENT), other.get(name, ABSENT))
    elif one is not other and (one is ABSENT or other is ABSENT or one != other):
        yield key, one, other


def differences(one: Data, other: Data) -> tuple[Key, ...]:
    """The keys whose values differ between two documents."""
    return tuple(key for key, _, _ in _differences((), one, other))


def without_zeros(data: Any) -> Any:  # noqa: ANN401 - documents hold anything
    """The same without values that are unset in Go: empty strings, lists, tables, 0, false."""
    if isinstance(data, dict):
        inner = {name: without_zeros(value) for name, value in data.items()}
        return {name: value for name, value in inner.items() if value not in ({}, [], "", 0)}
    return data
