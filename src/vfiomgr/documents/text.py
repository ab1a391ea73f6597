"""Texts: files that users name, JSON and TOML as values, and what a terminal may print.

Python accepts some things that other readers do not, and fails in its own ways: thousands of levels
or digits, NaN, halves of surrogate pairs. Callers see one kind of error for all of them.
"""

from __future__ import annotations

import codecs
import math
import os
import shlex
import stat
import sys
from collections.abc import Iterator, Sequence
from errno import EBADF, EINVAL, EISDIR
from typing import Any, NoReturn

from msgspec import field

from vfiomgr.diagnostic import Position
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.expressions import expression
from vfiomgr.value import Value

Path = tuple[str | int, ...]
"""The keys and numbers that lead to a part of a document."""


def shown_path(path: Path) -> str:
    """`devices[0].containerEdits.deviceNodes[1].path`."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".")


class Located(Value, eq=False):
    """A value and its place; lists and mappings contain parts."""

    place: Position
    scalar: object = None
    """For a scalar: its value."""
    text: str = ""
    """For a scalar: its text."""
    items: tuple[Located, ...] | None = None
    members: dict[str, Located] | None = None
    keys: dict[str, Position] = field(default_factory=dict)
    """The places of the members' keys."""
    is_plain: bool = False
    """For a scalar: whether it has no quotes, so that readers may interpret it differently."""
    stop: int = 0
    """For JSON: the end of its text."""

    @property
    def is_empty(self) -> bool:
        """Whether the value is missing, as after a key without a value."""
        return self.scalar is None and self.items is None and self.members is None

    @property
    def value(self) -> Any:  # noqa: ANN401 - as JSON has it
        """The value without places."""
        if self.items is not None:
            return [item.value for item in self.items]
        if self.members is not None:
            return {key: member.value for key, member in self.members.items()}
        return self.scalar

    def child(self, part: str | int) -> Located | None:
        """A member or an item."""
        if isinstance(part, str):
            return (self.members or {}).get(part)
        return self.items[part] if self.items is not None and part < len(self.items) else None

    def at(self, path: Path) -> Located | None:
        """The part at a path of keys and numbers."""
        here: Located | None = self
        for part in path:
            here = None if here is None else here.child(part)
        return here

    def place_of(self, path: Path) -> Position:
        """The place of a member's key or of an item; for an absent part, that of its parent."""
        while path:
            parent, here = self.at(path[:-1]), self.at(path)
            if here is not None and parent is not None:
                return parent.keys.get(str(path[-1]), here.place)
            path = path[:-1]
        return self.place

    def descendants(self) -> Iterator[Located]:
        """This part and all parts of it, in the order of the text."""
        yield self
        for part in (*(self.items or ()), *(self.members or {}).values()):
            yield from part.descendants()


_DEEPEST = 100
"""Maximum number of levels; configurations have ten."""
_BRACKET = expression(r"[\[\]{}]")
_MOST_BITS = 128
"""Maximum bits of integers; device numbers have 64, and 4,300 digits cannot be printed."""


class Malformed(ValueError):  # noqa: N818 - what the text is, not that it is an error
    """A malformed text; `line` and `column`, from 1, are 0 if unknown."""

    def __init__(self, why: str, line: int = 0, column: int = 0) -> None:
        super().__init__(f"line {line} column {column}: {why}" if line else why)
        self.why = why
        self.line = line
        self.column = column


_MOST_PLAIN = 3_000_000
"""Maximum number of values without places, about 150 bytes each."""
_MARKS = (",", "[", "{")
"""Text before each value of JSON except the first."""


class TooMany(Malformed):
    """A text with more values than fit into the memory limit."""


def require_few(text: str, most: int, marks: Sequence[str] = _MARKS) -> None:
    """Require a text with up to `most` values, counted by separators before it is parsed.

    Raises:
        TooMany: it has more separators, including those in quotes.
    """
    if sum(map(text.count, marks)) > most:
        message = f"it has more than {most:,} values"
        raise TooMany(message)


def parse_json(text: str) -> Any:  # noqa: ANN401 - as JSON has it
    """The value of a JSON text.

    Raises:
        Malformed: it is not JSON, or contains something that readers should not accept.
    """
    import json  # noqa: PLC0415 - slow to import, and lists need none

    require_few(text, _MOST_PLAIN)
    try:
        value = json.loads(text, parse_constant=_reject_constant)
    except json.JSONDecodeError as error:
        why = f"{error.msg[:1].lower()}{error.msg[1:]}"
        raise Malformed(why, error.lineno, error.colno) from None
    except RecursionError:
        raise Malformed(_TOO_DEEP) from None
    except Malformed:
        raise
    except ValueError:
        raise Malformed(TOO_LARGE) from None
    require_sane(value, len(text))
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text.

    Raises:
        Malformed: it is not TOML, or contains something that readers should not accept.
    """
    import tomllib  # noqa: PLC0415 - few commands read TOML

    require_few(text, _MOST_PLAIN, (*_MARKS, "\n"))
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Malformed(str(error)) from None
    except RecursionError:
        raise Malformed(_TOO_DEEP) from None
    except ValueError:
        raise Malformed(TOO_LARGE) from None
    require_sane(tables, len(text), is_toml=True)
    return tables


_LINE = expression(r"\(at line (\d+)")


def line_of(error: Malformed, text: str) -> int:
    """The line of an error in TOML; the last line with content if the error is at the end."""
    told = _LINE.search(error.why)
    return int(told[1]) if told else max(len(text.rstrip().splitlines()), 1)


_TOO_DEEP = f"it is nested deeper than {_DEEPEST} levels"
TOO_LARGE = f"a number has more than {_MOST_BITS} bits"


def require_shallow(text: str) -> None:
    """Reject deeply nested brackets before a slow reader, such as that of YAML, gets them.

    Raises:
        Malformed: they are nested too deeply; brackets in quotes count too.
    """
    depth = 0
    for match in _BRACKET.finditer(text):
        depth += 1 if match[0] in "[{" else -1
        if depth > _DEEPEST:
            before = text[: match.start()]
            line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
            raise Malformed(_TOO_DEEP, line, column)


def is_sane(scalar: object) -> bool:
    """Whether a text or a number can be processed and printed."""
    try:
        if isinstance(scalar, str):  # a reader of YAML leaves pairs apart
            scalar = scalar.encode("utf-16", "surrogatepass").decode("utf-16")
        _require_scalar(scalar, is_toml=True)
    except (Malformed, UnicodeDecodeError):
        return False
    return True


def require_sane(value: object, most: int, *, is_toml: bool = False) -> None:
    """Require values that can be traversed, processed and printed.

    A text of `most` characters has at most that many parts, unless aliases repeat them.

    Raises:
        Malformed: they cannot.
    """
    left: list[tuple[object, int]] = [(value, 1)]
    count = 0
    while left:
        part, depth = left.pop()
        count += 1
        if depth > _DEEPEST:
            raise Malformed(_TOO_DEEP)
        if count > most + 1:
            message = "aliases make it larger than its text"
            raise Malformed(message)
        match part:
            case dict():
                left += [(member, depth + 1) for member in part.values()]
                for key in part:
                    _require_scalar(key, is_toml=is_toml)
            case list() | tuple() | set():
                left += [(item, depth + 1) for item in part]
            case _:
                _require_scalar(part, is_toml=is_toml)


def _require_scalar(value: object, *, is_toml: bool) -> None:
    match value:
        case str():
            if not value.isascii():
                _require_text(value)
        case int() if value.bit_length() > _MOST_BITS:
            raise Malformed(TOO_LARGE)
        case float() if not is_toml and not math.isfinite(value):
            message = "a number is not finite"
            raise Malformed(message)


def _require_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "a text contains half of a surrogate pair, which is not a character"
        raise Malformed(message) from None


def _reject_constant(name: str) -> NoReturn:
    message = f"{name} is not valid in JSON"
    raise Malformed(message)


def printable(text: str) -> str:
    r"""The text with everything that is not printable escaped as Python escapes it: `\x1b`.

    These are control characters (C0, DEL, C1), line separators, marks that change the
    direction of text or have no width, and bytes that are not UTF-8 (str.isprintable).
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    r"""`\x1b`, `\u202e`; the usual names of newline, carriage return and tab."""
    return repr(character)[1:-1]


STANDARD_INPUT = "-"
MOST_BYTES = 16 << 20
"""Larger than any layout, plan, pod or specification; larger documents have their own limit."""


def source_of(path: str) -> str:
    """The name of a file in errors."""
    return "<stdin>" if path == STANDARD_INPUT else path


def text_of(path: str, what: str) -> str:
    """The text of a file named by a user.

    Raises:
        UsageError: it cannot be read.
        InvalidDocument: the file is not text, or is too long.
    """
    try:
        return _bytes_of(path, what).decode()
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        message = f"{source_of(path)}: not UTF-8 text in line {line}"
        raise InvalidDocument(message, "save it as UTF-8") from None


def log_of(path: str) -> str:
    """The text of a log named by a user: UTF-8, UTF-16 of Windows, or one of these in gzip.

    Raises:
        UsageError: it cannot be read.
        InvalidDocument: it is too long, or damaged.
    """
    data = _bytes_of(path, "log")
    if data.startswith(GZIP):
        data = decompressed(data, MOST_BYTES + 1)
        if not 0 < len(data) <= MOST_BYTES:
            why = f"it is larger than {MOST_BYTES >> 20} MiB" if data else "it is damaged"
            message = f"cannot decompress log {source_of(path)}: {why}"
            part = f"zgrep -i vfio {shlex.quote(path)} | vfiomgr explain --log -"
            raise InvalidDocument(message, f"explain a part of it: {part}")
    return data.decode("utf-16" if data.startswith(_UTF_16) else "utf-8-sig", "replace")


GZIP = b"\x1f\x8b"
"""The first bytes of a file of gzip (RFC 1952)."""
_GZIP_BITS = 31
"""Window bits that make zlib expect a gzip header."""
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decompressed(data: bytes, most: int) -> bytes:
    """What gzip compressed, up to `most` bytes; empty if it is damaged."""
    import zlib  # noqa: PLC0415 - few files are compressed

    try:
        return zlib.decompressobj(_GZIP_BITS).decompress(data, most)
    except zlib.error:
        return b""


def _bytes_of(path: str, what: str) -> bytes:
    try:
        return bytes_of(path, what)
    except OSError as error:
        message = f"cannot read {what} {source_of(path)}: {error.strerror}"
        raise UsageError(message, "use an existing, readable file, or - for a pipe") from None


def bytes_of(path: str, what: str, most: int = MOST_BYTES) -> bytes:
    """The content of a file named by a user: a regular file, or standard input (`-`).

    A FIFO or a device is not opened, since reading it may never end.

    Raises:
        OSError: it cannot be read, or is not a regular file.
        InvalidDocument: it has more than `most` bytes.
    """
    if path == STANDARD_INPUT and sys.stdin is None:  # closed by the caller
        raise OSError(EBADF, os.strerror(EBADF))
    if path == STANDARD_INPUT:
        data = sys.stdin.buffer.read(most + 1)
    else:
        _require_regular(os.stat(path).st_mode)
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        with open(os.open(path, flags), "rb") as file:
            _require_regular(os.fstat(file.fileno()).st_mode)  # it may have been exchanged
            data = file.read(most + 1)
    if len(data) > most:
        message = f"cannot read {what} {source_of(path)}: it is larger than {most >> 20} MiB"
        raise InvalidDocument(message, "check whether it is the right file")
    return data


def _require_regular(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR))
    if not stat.S_ISREG(mode):
        raise OSError(EINVAL, "not a regular file")


class TextFile(Value):
    """A small configuration file of the host."""

    path: str
    text: str


_PACKAGE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_PLACES = (os.path.join(_PACKAGE, "data"), os.path.dirname(os.path.dirname(_PACKAGE)))


def resource_directory(name: str) -> str:
    """The directory `templates` or `kata`.

    Raises:
        FileNotFoundError: the installation is incomplete.
    """
    for place in _PLACES:
        directory = os.path.join(place, name)
        if os.path.isdir(directory):
            return directory
    message = f"{name}/ is missing from this installation of vfiomgr"
    raise FileNotFoundError(message)


_SEAL = expression(r"# vfiomgr-sha256: [0-9a-f]{64}\n")


def sealed(text: str) -> str:
    """A text with its hash in the last line, by which a later edit is detected."""
    from hashlib import sha256  # noqa: PLC0415 - `list` needs none

    bare = unsealed(text)
    bare += "" if bare.endswith("\n") else "\n"
    digest = sha256(bare.encode(errors="replace")).hexdigest()
    return f"{bare}# vfiomgr-sha256: {digest}\n"


def unsealed(text: str) -> str:
    """The text without its hash."""
    return _SEAL.sub("", text)


def is_sealed(text: str) -> bool:
    """Whether a text has its hash, so that it is as vfiomgr wrote it, in whatever version."""
    return text == sealed(text)
