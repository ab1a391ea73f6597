"""Texts of configuration files with values set or taken out; all else in them stays as it is.

What comes out is always read again: a text whose values are not those that were meant is refused.
"""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Any

from vfiomgr.adapters.runtimes import values
from vfiomgr.errors import InvalidDocument, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.model.runtime import OwnedFile, OwnedKey, Setting

_BY_HAND = "write it by hand: vfiomgr … --dry-run shows the keys; and please report the file"
_MARK = "\ufeff"


def parse(text: str, place: str) -> values.Data:
    """What a file says, as TOML or, where its name ends so, JSON.

    Raises:
        InvalidDocument: it cannot be read.

    """
    if "\ufffd" in text or text.startswith(_MARK):
        message = f"{place} is not plain UTF-8, or begins with a byte order mark"
        raise InvalidDocument(message, "save it as UTF-8 without a byte order mark")
    return _parse_json(text, place) if is_json(place) else _parse_toml(text, place)


def is_json(place: str) -> bool:
    """Whether a file holds JSON."""
    return place.endswith(".json")


def _parse_toml(text: str, place: str) -> values.Data:
    import tomllib  # noqa: PLC0415 - few commands read TOML

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = f"{place} cannot be read: {error}"
        raise InvalidDocument(message, "mend the file first; nothing was changed") from None


def _parse_json(text: str, place: str) -> values.Data:
    if not text.strip():
        return {}
    try:
        data = json.loads(text)
    except ValueError as error:
        message = f"{place} cannot be read: {error}"
        raise InvalidDocument(message, "mend the file first; nothing was changed") from None
    if not isinstance(data, dict):
        message = f"{place} cannot be read: it holds no object"
        raise InvalidDocument(message, "mend the file first; nothing was changed")
    return data


def with_settings(text: str, settings: Iterable[Setting], place: str) -> str:
    """The text with values set, in the places where a person would look for them.

    Raises:
        InvalidDocument: the text cannot be read.
        Refusal: it is written in a way in which the values cannot be set.

    """
    settings = tuple(settings)
    data = parse(text, place)
    try:
        wanted = values.with_settings(data, settings)
        made = _set_json(text, wanted) if is_json(place) else _set_toml(text, settings)
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        message = f"{place} is written in a way that vfiomgr cannot edit ({error})"
        raise Refusal(message, _BY_HAND) from error
    return _verified(made, wanted, place)


def _verified(made: str, wanted: values.Data, place: str) -> str:
    if parse(made, place) != wanted:
        message = f"{place} is written in a way that vfiomgr cannot edit without harm"
        raise Refusal(message, _BY_HAND)
    return made


def _set_toml(text: str, settings: Iterable[Setting]) -> str:
    import tomlkit  # noqa: PLC0415 - slow to import

    document = tomlkit.parse(text)
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
    """Set what is in a table off as far as the tables around it are."""
    for _, inner in table.value.body if indent else ():
        inner.trivia.indent = f"{indent}  "
        if hasattr(inner, "value") and hasattr(inner.value, "body"):
            _indent(inner, inner.trivia.indent)


def _item(value: Any) -> Any:  # noqa: ANN401 - tomlkit's own
    """A value as tomlkit has it; tables within tables get headers of their own."""
    import tomlkit  # noqa: PLC0415 - slow to import

    if not isinstance(value, dict):
        return tomlkit.item(value)
    table = tomlkit.table()
    for name in sorted(value, key=lambda name: isinstance(value[name], dict)):
        table[name] = _item(value[name])
    return table


def _set_json(text: str, wanted: values.Data) -> str:
    """The document in the style of the text, as far as that has one."""
    for indent in (4, 2, "\t", None, 3, 8):
        for ascii_only in (False, True):
            same = json.dumps(json.loads(text or "{}"), indent=indent, ensure_ascii=ascii_only)
            if same.strip() == text.strip():
                made = json.dumps(wanted, indent=indent, ensure_ascii=ascii_only)
                return made + (text[len(text.rstrip()) :] if text.strip() else "\n")
    return json.dumps(wanted, indent=4, ensure_ascii=False) + "\n"


def without_file(current: str, file: OwnedFile, keys: Iterable[OwnedKey]) -> str | None:
    """A file's text with what was written taken out; None where nothing would be left of it.

    Where nothing else was changed, that is the text of before, to the byte.

    Raises:
        InvalidDocument: the text cannot be read.
        Refusal: it is written in a way in which the values cannot be taken out.

    """
    keys = tuple(keys)
    if current == file.after and keys == file.keys:
        return file.before
    data = parse(current, file.path)
    wanted = values.without_keys(data, keys)
    if file.before is None and not wanted:
        return None
    try:
        for made in _candidates(current, file, keys, wanted):
            if _says(made, wanted, file.path):
                return made
    except (AttributeError, TypeError, ValueError, LookupError):
        pass  # tomlkit's own way with what it does not expect
    message = f"{file.path} is written in a way that vfiomgr cannot edit without harm"
    raise Refusal(message, "take the keys out by hand, then run the command again")


def _says(made: str, wanted: values.Data, place: str) -> bool:
    try:
        return parse(made, place) == wanted
    except InvalidDocument:
        return False


def _candidates(
    current: str, file: OwnedFile, keys: tuple[OwnedKey, ...], wanted: values.Data
) -> Iterator[str]:
    """Texts that may be what is wanted, the one that keeps most first."""
    cut = reverted(current, file.before or "", file.after)
    if cut is not None:
        yield cut
    if is_json(file.path):
        yield _set_json(current, wanted)
    else:
        yield _taken_out_of_toml(current, keys)


def reverted(current: str, before: str, after: str) -> str | None:
    """A text with what led from `before` to `after` undone; None where that is not found in it."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for kind, i1, i2, j1, j2 in matcher.get_opcodes():
        if kind == "equal":
            continue
        made, lost = "".join(new[j1:j2]), "".join(old[i1:i2])
        if not made or current.count(made) != 1:
            return None
        current = current.replace(made, lost)
    return current


def _taken_out_of_toml(current: str, keys: Iterable[OwnedKey]) -> str:
    import tomlkit  # noqa: PLC0415 - slow to import

    document = tomlkit.parse(current)
    for key in keys:
        *tables, last = key.path
        chain: list[Any] = [document]
        for name in tables:
            if name not in chain[-1]:
                break
            chain.append(chain[-1][name])
        if len(chain) <= len(tables) or last not in chain[-1]:
            continue
        there = chain[-1][last]
        left = values.remaining(there.unwrap() if hasattr(there, "unwrap") else there, key)
        if left is not values.ABSENT:
            chain[-1][last] = _item(left)
            continue
        chain[-1].remove(last)
        for outer, name in zip(reversed(chain[:-1]), reversed(tables), strict=True):
            if len(outer[name]):
                break
            outer.remove(name)
    return document.as_string()


def difference(path: str, before: str | None, after: str | None) -> str:
    """What a person reads before a file is changed: a unified difference."""
    lines = difflib.unified_diff(
        _lines(before),
        _lines(after),
        "/dev/null" if before is None else path,
        "/dev/null" if after is None else path,
    )
    return "".join(lines)


def _lines(text: str | None) -> list[str]:
    lines = (text or "").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n\\ No newline at end of file\n"
    return lines
