"""Configurations of Kata as text: a drop-in, or a whole one made of another."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from vfiomgr.adapters.kata.read import merged, parse
from vfiomgr.adapters.kata.tables import make_tables
from vfiomgr.model.parsed import Malformed, parse_toml

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from vfiomgr.model.kata_plan import KataPlan, KeyEntry, KeyValue
    from vfiomgr.model.path import HostPath

_WHEN = {
    "cold": "Devices are there when the guest starts",
    "hot": "Devices are plugged in when their container comes",
    None: "Devices that a container is given are plugged in when it comes",
}
_HEAD = re.compile(r"# For Kata [^\n]*: belongs into config\.d beside ")
_PORTS = ", each behind a PCIe root port of its own"


def render_drop_in(plan: KataPlan) -> str:
    """The keys alone, for config.d beside the configuration that the runtime reads."""
    import tomlkit  # noqa: PLC0415 - slow, and only these renderers need it

    document = tomlkit.document()
    for line in _head(plan):
        document.add(tomlkit.comment(line))
    for entry in plan.entries:
        _set(document, entry)
    return tomlkit.dumps(document)


def is_drop_in(text: str) -> bool:
    """Whether a text is what `render_drop_in` made."""
    return _HEAD.match(text) is not None


def render_whole(
    text: str, path: HostPath, drop_ins: Iterable[tuple[HostPath, str]], plan: KataPlan
) -> str:
    """A configuration with these keys; comments and all else stay.

    What its drop-ins set goes in first: a configuration elsewhere does not have them beside it.

    Raises:
        InvalidDocument: one of the texts is no TOML.

    """
    known = parse(text, path)
    entries = [
        *(entry for name, content in sorted(drop_ins) for entry in _entries(parse(content, name))),
        *plan.entries,
    ]
    expected = _with(known, entries)
    made = _edited(text, entries)
    if not _is(made, expected):
        message = f"{path}: its text with the new keys does not say what it has to"
        raise RuntimeError(message)
    return made


def _edited(text: str, entries: Sequence[KeyEntry]) -> str:
    import tomlkit  # noqa: PLC0415

    document = tomlkit.parse(text)
    make_tables(document, (entry.table for entry in entries))
    for entry in entries:
        _set(document, entry)
    return tomlkit.dumps(document)


def _with(document: Mapping[str, Any], entries: Iterable[KeyEntry]) -> dict[str, Any]:
    """The tables with these keys, as Kata merges drop-ins."""
    result: dict[str, Any] = dict(document)
    for entry in entries:
        over: Any = {entry.key: _plain(entry.value)}
        for name in reversed(entry.table):
            over = {name: over}
        result = merged(result, over)
    return result


def _is(text: str, expected: Mapping[str, Any]) -> bool:
    """Whether a text that was made here is TOML, and says this."""
    try:
        return parse_toml(text) == expected
    except Malformed:
        return False


def _head(plan: KataPlan) -> Iterator[str]:
    what = f"{plan.release}, {plan.hypervisor}"
    yield f"For {what}: belongs into config.d beside the configuration that it reads."
    yield f"{_WHEN[plan.plug]}{_PORTS if plan.value('pcie_root_port') is not None else ''}."


def _entries(document: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[KeyEntry]:
    from vfiomgr.model.kata_plan import KeyEntry  # noqa: PLC0415 - drop-ins alone need it

    for key, value in document.items():
        if isinstance(value, dict):
            yield from _entries(value, (*place, key))
        else:
            yield KeyEntry(place, key, tuple(value) if isinstance(value, list) else value)


def _set(document: Any, entry: KeyEntry) -> None:  # noqa: ANN401 - tomlkit's tables
    """Give a key a value where it stands, or add it; a value that is the same stays as written."""
    import tomlkit  # noqa: PLC0415

    table = document
    for depth, name in enumerate(entry.table, 1):
        if not isinstance(table.get(name), dict):
            table.pop(name, None)
            table.add(name, tomlkit.table(is_super_table=depth < len(entry.table)))
        table = table[name]
    value = _plain(entry.value)
    old = table.get(entry.key)
    known = old.unwrap() if hasattr(old, "unwrap") else old
    if type(known) is type(value) and known == value:
        return
    if isinstance(known, dict):
        table.remove(entry.key)
    table[entry.key] = value
    if entry.comment and old is None:
        table[entry.key].comment(entry.comment)


def _plain(value: KeyValue) -> str | int | bool | list[str]:
    return list(value) if isinstance(value, tuple) else value
