"""The table of Kata's keys: kata/keys.json (docs/decisions/0012-kata-keys.md says how it came)."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from vfiomgr.adapters.resources import resource_directory
from vfiomgr.model.kata_keys import KataKey, KeyForm, KeyTable, Releases
from vfiomgr.model.version import Version

_FORM = ("type", "range", "unit")


@cache
def key_table() -> KeyTable:
    """The table that this vfiomgr carries."""
    with open(f"{resource_directory('kata')}/keys.json", encoding="utf-8") as file:
        document = json.load(file)
    return KeyTable(
        releases=tuple(map(Version.parse, document["releases"])),
        keys=tuple(map(_key, document["keys"])),
        strict={(row["runtime"], row["section"]): _releases(row) for row in document["strict"]},
        annotations={
            (row["runtime"], row["annotation"]): _releases(row) for row in document["annotations"]
        },
    )


def _key(row: dict[str, Any]) -> KataKey:
    forms = tuple(map(_form, (*row.get("before", ()), row)))
    return KataKey(row["runtime"], row["section"], row["key"], _releases(row), forms)


def _form(row: dict[str, Any]) -> KeyForm:
    values = {name: row[name] for name in _FORM if name in row}
    return KeyForm(Version.parse(row["last"]), **values)


def _releases(row: dict[str, Any]) -> Releases:
    return Releases(Version.parse(row["first"]), Version.parse(row["last"]))
