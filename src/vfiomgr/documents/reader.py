"""Reads documents written by people: JSON or YAML 1.2, with the place of every part."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from vfiomgr.diagnostic import Diagnostic, Position, flaw, in_document
from vfiomgr.documents.json_text import read_json
from vfiomgr.documents.text import (
    TOO_LARGE,
    Located,
    Malformed,
    Path,
    TooMany,
    is_sane,
    parse_json,
    require_few,
    require_sane,
    require_shallow,
)
from vfiomgr.errors import InvalidDocument
from vfiomgr.expressions import expression
from vfiomgr.value import Value

if TYPE_CHECKING:
    from ruamel.yaml import YAML

    from vfiomgr.documents.jsonable import Misfit

_OPENS_JSON = ("{", "[")
_TOO_DEEP = "it is nested too deeply"
_DIGITS = "for integer string conversion"
"""The message of int() for more digits than it converts."""
_MOST_REPEATED = 100_000
"""Maximum number of parts that aliases repeat: they can make a short text very large."""
_DEEPEST = 100
_LONGEST = 4 << 20
"""Maximum characters; a YAML reader that keeps places takes a minute for them."""
_MOST_VALUES = 200_000
"""Maximum number of values of YAML, about 1 KiB each."""
_MARKS = ("\n", "\r", "\x85", "\u2028", "\u2029", ",", "[", "{", "- ", "-\t", "? ", "?\t")
"""Text before each value of YAML except the first; all line breaks of YAML are included."""
_PART_OF_A_WORD = expression(r"[\w.+-]*")
"""What may be left of a number or of a word such as `true` at the end of a truncated JSON text."""
_TAG = "tag:yaml.org,2002:"
_MERGE = "<<"
MERGES = "<< merges mappings only in YAML 1.1"
"""The error for it."""
_HALF = ("half of a surrogate pair, which is not a character", "remove it")


class Wording(Value):
    """How error messages name a kind of document and its parts."""

    noun: str
    nouns: str
    where: Callable[[Path], str]
    """Names a part, from the keys and numbers that lead to it."""
    start: str = ""
    """The remedy for an empty file."""
    several: str = "keep one"
    """The remedy for a second document."""
    reads_first: bool = False
    """Whether a second document is an error, and the first is read anyway."""
    merges: Literal["refused", "told", "taken"] = "refused"
    """How `<<` is handled: an error; an error, but applied; applied."""
    takes_large: bool = True
    """Whether a number that cannot be processed is read as text; otherwise it is an error."""


_ANY = Wording("a document", "documents", lambda _: "", merges="taken", takes_large=False)


class Unreadable(ValueError):  # noqa: N818 - what the text is, not that it is an error
    """A text that is not a document; this error is the only one reported."""

    def __init__(self, found: Diagnostic) -> None:
        super().__init__(in_document(found))
        self.flaw = found


def read_located(text: str, wording: Wording) -> tuple[Located, list[Diagnostic]]:
    """The content of a JSON or YAML 1.2 text, and its duplicate and ambiguous parts.

    Raises:
        Unreadable: it is neither, or not one document.
    """
    documents, flaws = _read(text, wording)
    if not documents:
        _fail(Position(), "the file is empty", wording.start)
    if len(documents) > 1:
        place, what = documents[1].place, "a second document begins here"
        if not wording.reads_first:
            _fail(place, what, wording.several)
        flaws.insert(0, flaw("document-second", place, "", what, wording.several))
    return documents[0], flaws


def read_all_located(text: str, wording: Wording) -> tuple[list[Located], list[Diagnostic]]:
    """The documents of a stream, as `read_located` reads one; empty ones are left out.

    Raises:
        Unreadable: it is not a document, or empty.
    """
    found, flaws = _read(text, wording)
    documents = [document for document in found if not document.is_empty]
    if not documents:
        _fail(Position(), "the file is empty", wording.start)
    return documents, flaws


def read_values(text: str, source: str, remedy: str) -> Any:  # noqa: ANN401 - as JSON has it
    """The value of a text, without places: JSON if it begins like JSON, otherwise YAML.

    Raises:
        InvalidDocument: it is neither; the message names `source` and the place in it.
    """
    if text.lstrip().startswith(_OPENS_JSON):
        try:
            return parse_json(text)
        except Malformed as error:
            why = "the file is truncated" if _is_cut_off(text, error) else str(error)
            message = f"{source}: not JSON: {why}"
            raise InvalidDocument(message, remedy) from None
    try:
        documents, flaws = _read(text, _ANY)
        if len(documents) > 1:
            _fail(documents[1].place, "a second document begins here", _ANY.several)
    except Unreadable as error:
        documents, flaws = [], [error.flaw]
    if flaws:
        message = f"{source}:{in_document(flaws[0])}"
        raise InvalidDocument(message, remedy)
    return documents[0].value if documents else None


def _is_cut_off(text: str, error: Malformed) -> bool:
    """Whether a text that begins like JSON is malformed only because its end is missing.

    An error before that is named instead, and so are words after the end.
    """
    if not error.line or error.why.startswith("extra data"):
        return False
    present = text.rstrip()
    if error.why.startswith("unterminated string"):  # its place is that of the quote
        return not present.endswith(("}", "]"))
    rest = "\n".join(present.split("\n")[error.line - 1 :])[error.column - 1 :]
    return _PART_OF_A_WORD.fullmatch(rest) is not None


def misfit_in(error: Misfit, text: str) -> str:
    """The error and its place in the text: `12:5: devices.0: Expected ...`."""
    try:
        place = read_located(text, _ANY)[0].place_of(error.keys)
    except Unreadable as unread:  # a key twice, in a text that YAML takes too long for
        place = unread.flaw.place or Position()
    return f"{place.line}:{place.column}: {error}"


def _read(text: str, wording: Wording) -> tuple[list[Located], list[Diagnostic]]:
    """All documents; JSON is read as JSON, since YAML reads some of its texts differently."""
    try:
        return [read_json(text)], []
    except TooMany as many:
        _fail(Position(), many.why, _too_large(wording))
    except Malformed:
        nodes = _nodes(text, wording)
    flaws: list[Diagnostic] = []
    try:
        return [_Locator(flaws, wording).located(node, ()) for node in nodes], flaws
    except RecursionError:
        _fail(Position(), _TOO_DEEP, _too_deep(wording))


def _nodes(text: str, wording: Wording) -> list[Any]:
    """The nodes of all documents of YAML."""
    from ruamel.yaml.error import YAMLError  # noqa: PLC0415 - slow, and few documents are YAML

    if len(text) > _LONGEST:
        _fail(Position(), f"it is larger than {_LONGEST >> 20} MiB", _too_large(wording))
    try:
        require_few(text, _MOST_VALUES, _MARKS)
        require_shallow(text)
    except TooMany as many:
        _fail(Position(), many.why, _too_large(wording))
    except Malformed as deep:
        _fail(Position(deep.line, deep.column), deep.why, _too_deep(wording))
    try:
        return list(_yaml().compose_all(text))
    except (YAMLError, ValueError) as error:
        raise Unreadable(_syntax_flaw(error, text)) from None
    except RecursionError:
        _fail(Position(), _TOO_DEEP, _too_deep(wording))


def _yaml() -> YAML:
    from ruamel.yaml import YAML  # noqa: PLC0415 - slow, and few documents are YAML

    return YAML(typ="safe", pure=True)


def _too_large(wording: Wording) -> str:
    return f"{wording.noun} needs only a few KiB: check whether it is the right file"


def _too_deep(wording: Wording) -> str:
    return f"{wording.noun} needs at most ten levels"


def _fail(place: Position, what: str, remedy: str) -> NoReturn:
    raise Unreadable(flaw("unreadable", place, "", what, remedy))


def _place(node: Any) -> Position:  # noqa: ANN401 - as above
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)


_SAME_INDENTATION = "use the same indentation for all keys of a mapping"
_KEY_AND_VALUE = expression(r"(?P<before>[ -]*)[^ #'\"-][^#]*?:[ ]+[^ #]")
"""A line with a key and a value that another line may continue."""
_SYNTAX = (
    ("character '\\t'", "a tab cannot be used for indentation", "indent with spaces"),
    ("undefined alias", "* begins an alias here", 'put a text with * into quotes: "*A40*"'),
    ("while scanning an alias", "* begins an alias here", 'put a text with * into quotes: "*A40*"'),
    ("character '@'", "a text cannot begin with @", "put it into quotes"),
    ("character '`'", "a text cannot begin with `", "put it into quotes"),
    ("character '%'", "a text cannot begin with %", "put it into quotes"),
    ("mapping values are not allowed", "a second `:` in one value", "put the text into quotes"),
    ("quoted scalar", "a quote is not closed", "close it with the same quote"),
    ("flow", "a bracket or brace is not closed, or a comma is missing", "close it"),
    ("simple key", "a key without `:`", "write key: value, with a space after the colon"),
    (
        "block",
        "the indentation does not match any line above",
        _SAME_INDENTATION,
    ),
    ("second occurrence", "an anchor is defined twice", "give each anchor a name of its own"),
)
"""Messages of the YAML reader, what they mean here, and the remedy."""


def _is_too_deep(text: str, line: int) -> bool:
    """Whether a line (from 0) has its first `:`, and a key with a value above it is less deep.

    The YAML reader takes such a key for the second line of that value.
    """
    lines = text.splitlines()
    above = _KEY_AND_VALUE.match(next(filter(str.strip, reversed(lines[:line])), ""))
    key, _, _ = lines[line].partition(":")
    return above is not None and len(key) - len(key.lstrip(" -")) > len(above["before"])


def _syntax_flaw(error: Exception, text: str) -> Diagnostic:
    """The syntax error of a text, in one line."""
    if text.lstrip().startswith("{"):
        try:
            parse_json(text)
        except Malformed as why:
            if why.line:
                what = f"not JSON or YAML: {why.why}"
                return flaw(
                    "unreadable",
                    Position(why.line, why.column),
                    "",
                    what,
                    "correct it there or just before",
                )
    said = f"{getattr(error, 'problem', None) or error} {getattr(error, 'context', None) or ''}"
    mark = getattr(error, "problem_mark", None)
    place = Position() if mark is None else Position(mark.line + 1, mark.column + 1)
    if "mapping values" in said and mark is not None and _is_too_deep(text, mark.line):
        what = "the line is indented deeper than the key above, which already has a value"
        return flaw("unreadable", place, "", what, _SAME_INDENTATION)
    for part, what, remedy in _SYNTAX:
        if part in said:
            return flaw("unreadable", place, "", what, remedy)
    if hasattr(error, "position"):
        before = text[: error.position]
        place = Position(before.count("\n") + 1, len(before) - before.rfind("\n"))
        return flaw("unreadable", place, "", "a control character", "remove it")
    return flaw(
        "unreadable",
        place,
        "",
        f"not YAML: {' '.join(said.split())}",
        "correct it there or just before",
    )


class _Locator:
    """Turns nodes into values with places; errors are collected in `flaws`."""

    def __init__(self, flaws: list[Diagnostic], wording: Wording) -> None:
        self._flaws = flaws
        self._wording = wording
        self._constructor = _yaml().constructor
        self._above: list[int] = []
        self._seen: set[int] = set()
        self._repeated = 0

    def located(self, node: Any, path: Path) -> Located:  # noqa: ANN401 - as above
        self._repeated += id(node) in self._seen
        self._seen.add(id(node))
        if self._repeated > _MOST_REPEATED:
            _fail(_place(node), f"too large for {self._wording.noun}", "use fewer aliases")
        if id(node) in self._above:
            _fail(_place(node), "an alias contains itself", "write the value instead of the alias")
        if len(self._above) > _DEEPEST:
            what = f"it is nested deeper than {_DEEPEST} levels"
            _fail(_place(node), what, _too_deep(self._wording))
        self._above.append(id(node))
        found = self._read(node, path)
        self._above.pop()
        return found

    def _read(self, node: Any, path: Path) -> Located:  # noqa: ANN401 - as above
        if node.id == "scalar":
            meant = self._scalar(node, path)
            return Located(_place(node), meant, str(node.value), is_plain=not node.style)
        if not str(node.tag).startswith(_TAG):
            self._add("yaml-tag", node, path, f"the tag {node.tag}", self._no_tags)
        if node.id == "sequence":
            items = (self.located(item, (*path, n)) for n, item in enumerate(node.value))
            return Located(_place(node), items=tuple(items))
        return self._mapping(node, path)

    def _mapping(self, node: Any, path: Path) -> Located:  # noqa: ANN401 - as above
        members: dict[str, Located] = {}
        keys: dict[str, Position] = {}
        merged: list[Located] = []
        for key, value in node.value:
            if key.id == "scalar" and not is_sane(key.value):
                _fail(_place(key), *_HALF)
            if key.id != "scalar":
                self._add(
                    "unreadable", key, path, "a list or mapping as a key", "a key must be a text"
                )
            elif key.value == _MERGE:
                if self._wording.merges != "taken":
                    self._add("key-merged", key, path, MERGES, "write the keys out")
                if self._wording.merges != "refused":
                    found = self.located(value, path)
                    merged += found.items if found.items is not None else [found]
            elif key.value in keys:
                first = keys[key.value].line
                remedy = f"line {first} already has it: keep one"
                self._add("key-twice", key, path, f"duplicate key {key.value!r}", remedy)
            else:
                keys[key.value] = _place(key)
                members[key.value] = self.located(value, (*path, str(key.value)))
        for part in merged:
            for name, member in (part.members or {}).items():
                members.setdefault(name, member)
                keys.setdefault(name, part.keys[name])
        return Located(_place(node), members=members, keys=keys)

    def _scalar(self, node: Any, path: Path) -> object:  # noqa: ANN401 - as above
        kind = str(node.tag).removeprefix(_TAG)
        if not is_sane(node.value):
            _fail(_place(node), *_HALF)
        match kind:
            case "null":
                return None
            case "bool" | "int" | "float":
                return self._plain(node, path)
            case "str" | "timestamp":
                return node.value
        self._add("yaml-tag", node, path, f"the tag {node.tag}", self._no_tags)
        return node.value

    def _plain(self, node: Any, path: Path) -> object:  # noqa: ANN401 - as above
        is_strict = not self._wording.takes_large
        try:
            found = self._constructor.construct_object(node)
            if is_strict or not is_sane(found):
                require_sane(found, 1)
        except (ValueError, LookupError) as error:  # the last of tags that lie
            if is_strict:
                why = TOO_LARGE if _DIGITS in str(error) else " ".join(str(error).split())
                self._add("unreadable", node, path, why, "write another value")
            return node.value
        return found

    @property
    def _no_tags(self) -> str:
        return f"remove it: {self._wording.nouns} do not use any"

    def _add(self, rule: str, node: Any, path: Path, what: str, remedy: str) -> None:  # noqa: ANN401 - as above
        self._flaws.append(flaw(rule, _place(node), self._wording.where(path), what, remedy))
