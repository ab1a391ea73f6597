"""Sections of a document as tables of their own, so that keys can be set and added in them.

TOML has a section inline (`agent = {kata = {}}`), dotted (`agent.kata.x = 1`) or in several places
as well; tomlkit adds nothing to those.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tomlkit import TOMLDocument
    from tomlkit.items import Table


def make_tables(document: TOMLDocument, places: Iterable[tuple[str, ...]]) -> None:
    """Write the sections of these tables anew, at the end, where they are written otherwise."""
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
    """What tables of one name hold; what is no table holds nothing."""
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
