"""Set and remove values in the text of configuration files, keeping everything else.

The result is always read again: a text with unexpected values is refused.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vfiomgr.containers.runtimes import values
from vfiomgr.containers.runtimes.model import ConfigFile, Key, OwnedFile, Setting, shown
from vfiomgr.diagnostic import blocker, refusal, refuse
from vfiomgr.documents.difference import opcodes, unified
from vfiomgr.documents.json_text import read_object
from vfiomgr.documents.text import Malformed, parse_toml
from vfiomgr.errors import InvalidDocument
from vfiomgr.expressions import expression
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vfiomgr.containers.runtimes.model import OwnedKey
    from vfiomgr.documents.difference import Opcode
    from vfiomgr.documents.json_text import JsonDocument


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
    if not is_json(text, place):
        return _parse_toml(text, place)
    return dict(_read_json(text, place).root.value) if text.strip() else {}


def _read_json(text: str, place: str) -> JsonDocument:
    try:
        return read_object(text, place)
    except InvalidDocument as error:
        raise InvalidDocument(
            error.message, "correct the file first; nothing was changed"
        ) from None


def is_json(text: str, place: str) -> bool:
    """Whether a file contains JSON, whatever its name; TOML never begins with a brace."""
    return place.endswith(".json") or text.lstrip().startswith("{")


def _parse_toml(text: str, place: str) -> values.Data:
    try:
        return parse_toml(text)
    except Malformed as error:
        message = f"cannot read {place}: {error}"
        raise InvalidDocument(message, "correct the file first; nothing was changed") from None


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
        for write in (_set_toml, _add_to_toml):
            made = _attempt(write, text, settings)
            if made is not None and _says(made, wanted, place) and _lost(text, made) <= changed:
                return _with_ends(made, text)
    message = f"cannot edit {place} without losing other settings"
    hint = _by_hand(settings, text, place)
    raise refusal([blocker("runtime-file-not-editable", place, message, hint)])


def _set_json(text: str, wanted: values.Data, place: str) -> str:
    if parse(text, place):
        return _read_json(text, place).with_value(wanted).text
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


def _attempt(write: Callable[..., str], *arguments: object) -> str | None:
    """Try to write a text; None if tomlkit fails, which can happen in many ways."""
    from tomlkit.exceptions import TOMLKitError  # noqa: PLC0415 - slow to import

    try:
        return write(*arguments)
    except (TOMLKitError, AttributeError, TypeError, ValueError, LookupError, RecursionError):
        return None


def _lost(before: str, after: str) -> int:
    """How many lines of a text are missing in another one, or in another order."""
    old, new = before.splitlines(), after.splitlines()
    return len(old) - sum(i2 - i1 for kind, i1, i2, _, _ in opcodes(old, new) if kind == "equal")


def _add_to_toml(text: str, settings: Iterable[Setting]) -> str:
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
            lines[: len(head)] = _set_toml("".join(head), [setting]).splitlines(keepends=True)
        elif isinstance(setting.value, dict) or at is None:
            lines += ["\n", _set_toml("", [setting])]
        else:
            lines.insert(at + 1, _set_toml("", [Setting((last,), setting.value)]))
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


def _set_toml(text: str, settings: Iterable[Setting]) -> str:
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


def without_file(current: str, file: OwnedFile, keys: Iterable[OwnedKey]) -> str | None:
    """A file's text without what was written; None if nothing would be left.

    If nothing else was changed, the original text is restored exactly.

    Raises:
        InvalidDocument: the text is not readable.
        Refusal: its layout does not allow removing the values.

    """
    keys = tuple(keys)
    if current == file.after and keys == file.keys:
        return file.before
    data = parse(current, file.path)
    old = parse(file.before or "", file.path)
    wanted = values.without_keys(data, keys, old)
    if file.before is None and not wanted:
        return None
    for made in _candidates(current, file, keys, old, wanted):
        if made is not None and _says(made, wanted, file.path):
            return made
    message = f"cannot edit {file.path} without losing other settings"
    hint = "remove the keys manually, then run the command again"
    raise refusal([blocker("runtime-file-not-editable", file.path, message, hint)])


def _says(made: str, wanted: values.Data, place: str) -> bool:
    try:
        return parse(made, place) == wanted
    except InvalidDocument:
        return False


def _candidates(
    current: str, file: OwnedFile, keys: tuple[OwnedKey, ...], old: values.Data, wanted: values.Data
) -> Iterator[str | None]:
    """Possible results, the one that keeps most first."""
    yield reverted(current, file.before or "", file.after)
    if keys != file.keys:
        settings = [Setting(key.path, json.loads(key.value), key.is_item) for key in keys]
        yield reverted(
            current, file.before or "", with_settings(file.before or "", settings, file.path)
        )
    if is_json(current, file.path):
        yield _read_json(current, file.path).with_value(wanted).text
    else:
        yield _attempt(_taken_out_of_toml, current, keys, old)


def reverted(current: str, before: str, after: str) -> str | None:
    """A text with the change from `before` to `after` undone; None if it cannot be found there."""
    old, new, now = (text.splitlines(keepends=True) for text in (before, after, current))
    places = _places(new, now)
    hunks = [hunk for hunk in _changes(old, new) if hunk[0] != "equal"]
    for _, i1, i2, j1, j2 in reversed(hunks):
        found = [places.get(number, -1) for number in range(j1, j2)]
        if not found or -1 in found or found[-1] - found[0] != j2 - j1 - 1:
            return None
        now[found[0] : found[-1] + 1] = old[i1:i2]
    torn = (line if line.endswith("\n") else f"{line}\n" for line in now[:-1])
    return "".join((*torn, *now[-1:]))


def _places(new: list[str], now: list[str]) -> dict[int, int]:
    """The positions of lines of a text in a later version of it."""
    equal = (code for code in _changes(new, now) if code[0] == "equal")
    return {i: i - i1 + j1 for _, i1, i2, j1, _ in equal for i in range(i1, i2)}


def _changes(one: list[str], other: list[str]) -> list[Opcode]:
    """The changes of lines, whether the last one has a line end or not."""
    return opcodes(*([line.removesuffix("\n") for line in lines] for lines in (one, other)))


def _taken_out_of_toml(current: str, keys: Iterable[OwnedKey], old: values.Data) -> str:
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
        for depth in range(len(tables), 0, -1):
            was_there = values.found(old, tuple(tables[:depth])) is not values.ABSENT
            if len(chain[depth]) or was_there:
                break
            chain[depth - 1].remove(tables[depth - 1])
    return document.as_string()


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


HEAD = "# vfiomgr: entries come with `vfiomgr runtime install`, and go with\n"
HEAD += "# `vfiomgr runtime uninstall`.\n"
EMPTY_JSON = "{}\n"


class Edit(Value):
    """Values for a file."""

    file: ConfigFile
    settings: tuple[Setting, ...]
    head: str = ""
    """The heading of a new file."""
    block: str | None = None
    """For a template, which contains more than values: the text to append."""

    def made(self) -> OwnedFile:
        """The file as it was and as it will be.

        Raises:
            InvalidDocument: its text is not readable.
            Refusal: its text is not editable.

        """
        path, before = self.file.path, self.file.text
        start = start_of(before, self.head)
        if self.block is not None:
            return OwnedFile(path, before, joined(start, self.block))
        after = with_settings(start, self.settings, path)
        return OwnedFile(path, before, after, values.owned(parse(start, path), self.settings))


class Decision(Value):
    """The changes for an entry, in an order that is safe if interrupted."""

    edits: tuple[Edit, ...]
    notes: tuple[str, ...] = ()
    ours: tuple[Key, ...] = ()
    """Keys that the runtime may read differently afterwards, including all keys below."""
    expected: tuple[Setting, ...] = ()
    """What the runtime must read afterwards."""


def start_of(before: str | None, head: str) -> str:
    """The text to set values in: that of the file, or the heading of a new file."""
    is_new = before is None or (head == EMPTY_JSON and not before.strip())
    return head if is_new or before is None else before


def joined(start: str, block: str) -> str:
    """A template with an appended block."""
    gap = "" if not start or start.endswith("\n\n") else "\n" if start.endswith("\n") else "\n\n"
    return f"{start}{gap}{block}"
