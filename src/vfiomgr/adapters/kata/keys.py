"""The table of Kata's keys: kata/keys.json (docs/decisions/0012-kata-keys.md says how it came)."""

from __future__ import annotations

import json
from functools import cache

from vfiomgr.adapters.resources import resource_directory
from vfiomgr.model.kata_keys import KataKey, KeyTable
from vfiomgr.model.version import Version

_VERSIONS = ("since", "until", "maybe_since", "maybe_until", "removed")


@cache
def key_table() -> KeyTable:
    """The table that this vfiomgr carries."""
    with open(f"{resource_directory('kata')}/keys.json", encoding="utf-8") as file:
        rows = json.load(file)["keys"]
    return KeyTable(tuple(map(_key, rows)))


def _key(row: dict[str, str]) -> KataKey:
    versions = {name: Version.parse(row[name]) for name in _VERSIONS if name in row}
    texts = {name: text for name, text in row.items() if name not in _VERSIONS}
    return KataKey(**texts, **versions)  # type: ignore[arg-type]
