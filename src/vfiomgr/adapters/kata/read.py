"""Configurations of Kata: a file, and the drop-ins beside it that Kata reads after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vfiomgr.adapters.toml_place import line_of
from vfiomgr.errors import InvalidDocument
from vfiomgr.model.kata_settings import KataSettings
from vfiomgr.model.parsed import Malformed, parse_toml

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vfiomgr.model.path import HostPath

_SECTIONS = ("hypervisor", "agent", "runtime", "factory")
_NAMED = ("hypervisor", "agent")
"""Sections with a table for each name."""


def read_settings(
    path: HostPath, text: str, drop_ins: Iterable[tuple[HostPath, str]] = ()
) -> KataSettings:
    """What Kata makes of a file and its drop-ins, which it takes in the order of their names.

    Tables are merged, all else is replaced (decodeDropIns in src/runtime/pkg/katautils/config.go,
    toml_tree_ops in src/libs/kata-types/src/config/drop_in.rs).

    Raises:
        InvalidDocument: one of them is no TOML.

    """
    document = parse(text, path)
    read = []
    for name, content in sorted(drop_ins):
        document = merged(document, parse(content, name))
        read.append(name)
    return KataSettings(path, tuple(read), document)


def parse(text: str, source: str) -> dict[str, Any]:
    """The tables of a file.

    Raises:
        InvalidDocument: it is no TOML; `source` names it.

    """
    try:
        return parse_toml(text)
    except Malformed as error:
        message = f"{source}:{line_of(error, text)}: it is no TOML: {error}"
        raise InvalidDocument(message, "Kata reads it no better: correct that place") from None


def require_tables(document: Mapping[str, Any], source: str) -> None:
    """Make sure that the sections of a file are tables.

    Raises:
        InvalidDocument: one is none; Kata takes no such file.

    """
    for section in _SECTIONS:
        found = document.get(section, {})
        _require_table(found, section, source)
        for name, keys in found.items() if section in _NAMED else ():
            _require_table(keys, f"{section}.{name}", source)


def _require_table(found: object, place: str, source: str) -> None:
    if not isinstance(found, dict):
        message = f"{source}: {place} is {found!r}, where Kata wants a table"
        raise InvalidDocument(message, f"write [{place}], and its keys below it")


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with others over them: a value replaces another one whole."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        both = isinstance(old, dict) and isinstance(value, dict)
        result[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result
