"""Find, set and remove values in documents by key, without regard to their text."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vfiomgr.containers.runtimes.model import Key, Setting

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


def merge(data: Data, settings: Iterable[Setting], written: Data, target: Data) -> Data:
    """The data with the change of settings from `written` to `target`.

    Tables that are empty then are removed too, if `target` has none.
    """
    result = copy.deepcopy(data)
    for setting in settings:
        current = found(result, setting.key)
        if current is ABSENT:
            continue
        old, new = found(written, setting.key), found(target, setting.key)
        if setting.is_item:
            new = _without_item(current, setting.value, new)
        if setting.is_item or old != new:
            _replace(result, setting.key, new, target)
    return result


def _without_item(current: Any, item: Any, target: Any) -> Any:  # noqa: ANN401
    """A list without an item that `target` does not have; ABSENT if nothing is left of it."""
    has_list = isinstance(target, list)
    if not isinstance(current, list) or (has_list and item in target):
        return current
    left = [one for one in current if one != item]
    return left if left or has_list else ABSENT


def _replace(data: Data, key: Key, value: Any, target: Data) -> None:  # noqa: ANN401
    """Set or remove an existing value, with tables that are left empty."""
    tables = [found(data, key[:depth]) for depth in range(len(key))]
    if value is not ABSENT:
        tables[-1][key[-1]] = copy.deepcopy(value)
        return
    for depth in reversed(range(len(key))):
        del tables[depth][key[depth]]
        if tables[depth] or found(target, key[:depth]) is not ABSENT:
            return


def is_edited(data: Data, setting: Setting, *known: Data) -> bool:
    """Whether a value is another one than in all known documents; a removed value is not."""
    current = found(data, setting.key)
    if current is ABSENT or setting.is_item:
        return False
    return all(current != found(one, setting.key) for one in known)


def first_difference(one: Any, other: Any) -> tuple[Key, str, str]:  # noqa: ANN401
    """The key of the first difference of two values, and what each has there."""
    key, before, after = next(_differences((), one, other))
    return key, _told(before), _told(after)


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
