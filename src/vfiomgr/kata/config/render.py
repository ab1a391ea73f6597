"""Sections of a document as separate tables, so that keys can be set and added.

TOML also allows sections inline (`agent = {kata = {}}`), dotted (`agent.kata.x = 1`) or in several
places; tomlkit cannot add to those.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from vfiomgr.documents.parsed import Malformed, parse_toml
from vfiomgr.kata.model import KeyEntry
from vfiomgr.kata.settings import merged, parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from tomlkit import TOMLDocument
    from tomlkit.items import Table

    from vfiomgr.kata.model import KataPlan, KeyValue
    from vfiomgr.paths import HostPath


def make_tables(document: TOMLDocument, places: Iterable[tuple[str, ...]]) -> None:
    """Rewrite the sections of these tables at the end if they are not separate tables."""
    wanted = [place for place in places if place and not _is_plain(document, place)]
    for name in dict.fromkeys(place[0] for place in wanted):
        parts = [item for key, item in document.body if key is not None and key.key == name]
        if parts:
            document.remove(name)
            document.append(name, _one_table(parts))


def _is_plain(document: TOMLDocument, place: tuple[str, ...]) -> bool:
    from tomlkit.items import Table  # noqa: PLC0415 - slow, as tomlkit is

    containers: list[Any] = [document]
    for name in place:
        found = [
            (key, item)
            for container in containers
            for key, item in container.body
            if key is not None and key.key == name
        ]
        if not found:
            break
        if any(key.is_dotted() or not isinstance(item, Table) for key, item in found):
            return False
        containers = [item.value for _, item in found]
    return len(containers) == 1


def _one_table(parts: Sequence[Any]) -> Table:
    """The combined content of tables with one name; values that are not tables are ignored."""
    import tomlkit  # noqa: PLC0415
    from tomlkit.items import AoT, Comment, InlineTable, Table  # noqa: PLC0415

    bodies = [part.value.body for part in parts if isinstance(part, Table | InlineTable)]
    pairs = [pair for body in bodies for pair in body]
    values: list[tuple[str | None, Any]] = []
    tables: dict[str, list[Any]] = {}
    arrays: list[tuple[str, AoT]] = []
    for key, item in pairs:
        if key is None:
            if isinstance(item, Comment):
                values.append((None, item))
        elif isinstance(item, Table | InlineTable):
            tables.setdefault(key.key, []).append(item)
        elif isinstance(item, AoT):
            arrays.append((key.key, item))
        else:
            item.trivia.indent, item.trivia.trail = "", "\n"
            values.append((key.key, item))
    table = tomlkit.table(is_super_table=bool(tables) and not values and not arrays)
    for name, item in values:
        table.add(item) if name is None else table.append(name, item)
    for name, items in tables.items():
        table.append(name, _one_table(items))
    for name, array in arrays:
        table.append(name, array)
    return table


_WHEN = {
    "cold": "Devices are there when the guest starts",
    "hot": "Devices are plugged in when their container comes",
    None: "Devices that a container is given are plugged in when it comes",
}
_HEAD = re.compile(r"# For Kata [^\n]*: belongs into config\.d beside ")
_PORTS = ", each behind a PCIe root port of its own"


def render_drop_in(plan: KataPlan) -> str:
    """Only the keys, for config.d beside the configuration that the runtime reads."""
    import tomlkit  # noqa: PLC0415 - slow, and only these renderers need it

    document = tomlkit.document()
    for line in _head(plan):
        document.add(tomlkit.comment(line))
    for entry in plan.entries:
        _set(document, entry)
    return tomlkit.dumps(document)


def is_drop_in(text: str) -> bool:
    """Whether `render_drop_in` created a text."""
    return _HEAD.match(text) is not None


def render_whole(
    text: str, path: HostPath, drop_ins: Iterable[tuple[HostPath, str]], plan: KataPlan
) -> str:
    """A configuration with these keys; comments and everything else stay.

    The settings of its drop-ins are merged first, because a configuration elsewhere does not have
    them.

    Raises:
        InvalidDocument: one of the texts is not TOML.

    """
    known = parse(text, path)
    entries = [
        *(entry for name, content in sorted(drop_ins) for entry in _entries(parse(content, name))),
        *plan.entries,
    ]
    expected = _with(known, entries)
    made = _edited(text, entries)
    if not _is(made, expected):
        message = f"cannot edit {path}: the new text does not contain the new keys"
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
    """The tables with these keys, merged like Kata merges drop-ins."""
    result: dict[str, Any] = dict(document)
    for entry in entries:
        over: Any = {entry.key: _plain(entry.value)}
        for name in reversed(entry.table):
            over = {name: over}
        result = merged(result, over)
    return result


def _is(text: str, expected: Mapping[str, Any]) -> bool:
    """Whether a text created here is TOML with these tables."""
    try:
        return parse_toml(text) == expected
    except Malformed:
        return False


def _head(plan: KataPlan) -> Iterator[str]:
    what = f"{plan.release}, {plan.hypervisor}"
    yield f"For {what}: belongs into config.d beside the configuration that it reads."
    yield f"{_WHEN[plan.plug]}{_PORTS if plan.value('pcie_root_port') is not None else ''}."


def _entries(document: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[KeyEntry]:
    for key, value in document.items():
        if isinstance(value, dict):
            yield from _entries(value, (*place, key))
        else:
            yield KeyEntry(place, key, tuple(value) if isinstance(value, list) else value)


def _set(document: Any, entry: KeyEntry) -> None:  # noqa: ANN401 - tomlkit's tables
    """Set a key in its place, or add it; an equal value stays as written."""
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
