"""Write values into the text of TOML files with tomlkit, which keeps comments and order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vfiomgr.containers.runtimes import values
from vfiomgr.containers.runtimes.model import Setting
from vfiomgr.documents.text import Malformed, parse_toml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vfiomgr.containers.runtimes.model import Key


def additions(text: str, settings: Iterable[Setting]) -> Iterator[str]:
    """Ways to add values to a text, the usual one first; each may lose something."""
    for write in (_set, _add):
        made = _attempt(write, text, settings)
        if made is not None:
            yield made


def without_keys(text: str, keys: Iterable[Key], wanted: values.Data) -> str | None:
    """A text with the wanted values of keys, which may be none; None if tomlkit fails."""
    return _attempt(_replace, text, keys, wanted)


def _attempt(write: Callable[..., str], *arguments: object) -> str | None:
    """Try to write a text; None if tomlkit fails, which can happen in many ways."""
    from tomlkit.exceptions import TOMLKitError  # noqa: PLC0415 - slow to import

    try:
        return write(*arguments)
    except (TOMLKitError, AttributeError, TypeError, ValueError, LookupError, RecursionError):
        return None


def _set(text: str, settings: Iterable[Setting]) -> str:
    import tomlkit  # noqa: PLC0415 - slow to import

    # A table that comes after a comment without an end of line would be part of the comment.
    document = tomlkit.parse(f"{text}\n" if text and not text.endswith("\n") else text)
    for setting in settings:
        *tables, last = setting.key
        inner: Any = document
        for name in tables:
            if name not in inner:
                inner[name] = tomlkit.table(is_super_table=True)
            inner = inner[name]
        if setting.is_item and last in inner:
            inner[last].append(setting.value)
        elif setting.is_item:
            inner[last] = [setting.value]
        else:
            inner[last] = _item(setting.value)
            if isinstance(setting.value, dict):
                _indent(inner[last], inner[last].trivia.indent.rpartition("\n")[2])
    return document.as_string()


def _indent(table: Any, indent: str) -> None:  # noqa: ANN401 - tomlkit's own
    """Indent the content of a table like the tables around it."""
    for _, inner in table.value.body if indent else ():
        inner.trivia.indent = f"{indent}  "
        if hasattr(inner, "value") and hasattr(inner.value, "body"):
            _indent(inner, inner.trivia.indent)


def _item(value: Any) -> Any:  # noqa: ANN401 - tomlkit's own
    """A value for tomlkit; nested tables get their own headers."""
    import tomlkit  # noqa: PLC0415 - slow to import

    if not isinstance(value, dict):
        return tomlkit.item(value)
    table = tomlkit.table()
    for name in sorted(value, key=lambda name: isinstance(value[name], dict)):
        table[name] = _item(value[name])
    return table


def _add(text: str, settings: Iterable[Setting]) -> str:
    """Set plain values with tomlkit, others line by line.

    For tables whose parts are in an order that tomlkit cannot keep: new tables come last, values
    below the headers of their tables.
    """
    lines = [f"{line}\n" for line in text.removesuffix("\n").split("\n")] if text else []
    for setting in settings:
        *tables, last = setting.key
        at = _header(lines, tables)
        if not tables:
            head = lines if at is None else lines[:at]
            lines[: len(head)] = _set("".join(head), [setting]).splitlines(keepends=True)
        elif isinstance(setting.value, dict) or at is None:
            lines += ["\n", _set("", [setting])]
        else:
            lines.insert(at + 1, _set("", [Setting((last,), setting.value)]))
    return "".join(lines)


def _header(lines: list[str], tables: list[str]) -> int | None:
    """The line where a table begins; without a name, any table."""
    for at, line in enumerate(lines):
        if not line.lstrip().startswith("["):
            continue
        try:
            header = parse_toml(line)
        except Malformed:
            continue  # part of a list
        if not tables or values.found(header, tuple(tables)) == {}:
            return at
    return None


def _replace(current: str, keys: Iterable[Key], wanted: values.Data) -> str:
    """Set the wanted values of keys; emptied tables are removed with them."""
    import tomlkit  # noqa: PLC0415 - slow to import

    document = tomlkit.parse(current)
    for key in keys:
        depth = len(key)
        while depth > 1 and values.found(wanted, key[: depth - 1]) is values.ABSENT:
            depth -= 1
        *tables, last = key[:depth]
        inner: Any = document
        for name in tables:
            inner = inner[name]
        value = values.found(wanted, key)
        if value is values.ABSENT and last in inner:
            inner.remove(last)
        elif isinstance(value, list):
            for item in [item for item in inner[last].unwrap() if item not in value]:
                inner[last].remove(item)
        elif value is not values.ABSENT:
            inner[last] = _item(value)
    return document.as_string()
