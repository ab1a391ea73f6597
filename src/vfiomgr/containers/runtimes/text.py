"""Set and remove values in the text of configuration files, keeping everything else.

The result is always read again: a text with unexpected values, or without a line or comment that
was there, is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from vfiomgr.containers.runtimes import values
from vfiomgr.containers.runtimes.model import Key, Setting, shown
from vfiomgr.diagnostic import blocker, refusal, refuse
from vfiomgr.documents.difference import opcodes, unified
from vfiomgr.documents.json_text import read_object
from vfiomgr.documents.text import Malformed, parse_toml
from vfiomgr.errors import InvalidDocument
from vfiomgr.expressions import expression

if TYPE_CHECKING:
    from vfiomgr.documents.difference import Opcode


_MARK = "\ufeff"
_LINE_END = expression(r"(?<!\r)\n")
_INDENT = 4
"""For JSON without a layout; Docker's documentation uses two or four."""


def parse(text: str, place: str) -> values.Data:
    """The values of a TOML or JSON file.

    Raises:
        InvalidDocument: it is not readable.
    """
    if "\ufffd" in text or text.startswith(_MARK):
        message = f"{place} is not plain UTF-8, or has a byte order mark"
        raise InvalidDocument(message, "save it as UTF-8 without a byte order mark")
    try:
        if not is_json(text, place):
            return parse_toml(text)
        return dict(read_object(text, place).root.value) if text.strip() else {}
    except Malformed as error:
        message = f"cannot read {place}: {error}"
    except InvalidDocument as error:
        message = error.message
    raise InvalidDocument(message, "correct the file first; nothing was changed")


def is_json(text: str, place: str) -> bool:
    """Whether a file contains JSON, whatever its name; TOML never begins with a brace."""
    return place.endswith(".json") or text.lstrip().startswith("{")


def with_settings(text: str, settings: Iterable[Setting], place: str) -> str:
    """The text with values set, in the usual places.

    Raises:
        InvalidDocument: the text is not readable.
        Refusal: its layout does not allow setting the values.
    """
    settings = tuple(settings)
    data = parse(text, place)
    try:
        wanted = values.with_settings(data, settings)
    except (AttributeError, TypeError) as error:
        message = f"{place} has another value instead of a table or list: {error}"
        refuse("runtime-file-not-editable", place, message, _by_hand(settings, text, place))
    if is_json(text, place):
        edited = _with_ends(_set_json(text, wanted, place), text)
        if _says(edited, wanted, place):
            return edited
    else:
        changed = sum(values.found(data, s.key) is not values.ABSENT for s in settings)
        for made in additions(text, settings):
            is_lossless = _lost_lines(text, made) <= changed and not _lost_comments(text, made)
            if is_lossless and _says(made, wanted, place):
                return _with_ends(made, text)
    message = f"cannot edit {place} without losing other settings"
    hint = _by_hand(settings, text, place)
    raise refusal([blocker("runtime-file-not-editable", place, message, hint)])


def _set_json(text: str, wanted: values.Data, place: str) -> str:
    if parse(text, place):
        return read_object(text, place).with_value(wanted).text
    end = text[len(text.rstrip()) :] if text.strip() else "\n"
    return json.dumps(wanted, indent=_INDENT, ensure_ascii=False) + end


def _by_hand(settings: Iterable[Setting], text: str, place: str) -> str:
    """The text to add manually."""
    settings = tuple(settings)
    if is_json(text, place):
        wanted = json.dumps(values.with_settings({}, settings), ensure_ascii=False)
    else:
        wanted = "; ".join(line for setting in settings for line in _wanted(setting))
    return f"edit it manually, and please report the file; add: {wanted}"


def _wanted(setting: Setting) -> Iterator[str]:
    """A value with its key, one TOML line each; for an item with its list."""
    if isinstance(setting.value, dict):
        for name, value in setting.value.items():
            yield from _wanted(Setting((*setting.key, name), value))
        return
    key, value = shown(setting.key), json.dumps(setting.value, ensure_ascii=False)
    yield f"{value} in {key}" if setting.is_item else f"{key} = {value}"


def _with_ends(made: str, text: str) -> str:
    """A text with the line ends of another one, if those are uniform."""
    ends = text.count("\r\n")
    return _LINE_END.sub("\r\n", made) if ends and ends == text.count("\n") else made


def with_values(
    current: str,
    wanted: values.Data,
    merged: str | None,
    settings: Iterable[Setting],
    place: str,
) -> str:
    """The text with settings removed or restored; `merged` is the proposal that keeps most.

    Raises:
        Refusal: every way to write it would lose other settings or comments.
    """
    keys = [setting.key for setting in settings]
    if parse(current, place) == wanted:
        return current
    if merged is not None and _says(merged, wanted, place):
        return merged
    if is_json(current, place):
        return read_object(current, place).with_value(wanted).text
    made = without_keys(current, keys, wanted)
    if made is not None and _says(made, wanted, place) and not _lost_comments(current, made):
        return made
    message = f"cannot edit {place} without losing other settings"
    hint = f"remove {', '.join(map(shown, keys))} manually, then run the command again"
    raise refusal([blocker("runtime-file-not-editable", place, message, hint)])


def _says(made: str, wanted: values.Data, place: str) -> bool:
    try:
        return parse(made, place) == wanted
    except InvalidDocument:
        return False


def merge(current: str, before: str, after: str) -> str | None:
    """The present text with the change from `before` to `after`; other lines stay.

    None if the lines that change are not found in it.
    """
    old, new, now = (text.splitlines(keepends=True) for text in (before, after, current))
    equal = (code for code in _changes(old, now) if code[0] == "equal")
    places = {i: i - i1 + j1 for _, i1, i2, j1, _ in equal for i in range(i1, i2)}
    hunks = [hunk for hunk in _changes(old, new) if hunk[0] != "equal"]
    for _, i1, i2, j1, j2 in reversed(hunks):
        found = [places.get(number, -1) for number in range(i1, i2)]
        if not found or -1 in found:
            return None
        for place in reversed(found):
            del now[place]
        now[found[0] : found[0]] = new[j1:j2]
    torn = (line if line.endswith("\n") else f"{line}\n" for line in now[:-1])
    return "".join((*torn, *now[-1:]))


def _changes(one: list[str], other: list[str]) -> list[Opcode]:
    """The changes of lines, whether the last one has a line end or not."""
    return opcodes(*([line.removesuffix("\n") for line in lines] for lines in (one, other)))


def _lost_lines(before: str, after: str) -> int:
    """How many lines of a text are missing in another one, or in another order."""
    old, new = before.splitlines(), after.splitlines()
    return len(old) - sum(i2 - i1 for kind, i1, i2, _, _ in opcodes(old, new) if kind == "equal")


def _lost_comments(before: str, after: str) -> Counter[str]:
    """Comments of a TOML file that are missing in another text; also strings with a `#`."""
    one, other = (
        Counter(line.partition("#")[2] for line in text.splitlines() if "#" in line)
        for text in (before, after)
    )
    return one - other


def difference(path: str, before: str | None, after: str | None) -> str:
    """The unified difference that is shown before a file is changed."""
    lines = unified(
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
