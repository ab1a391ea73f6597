"""Documents with the place of everything in them: what is wrong can be told by line and column."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode

from vfiomgr.documents.parsed import Malformed, is_sane, parse_json, require_shallow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_MOST_NODES = 100_000
"""Aliases can make a short text mean more than any host could need."""
_DEEPEST = 100
_LONGEST = 4 << 20
"""Characters; a reader of YAML that keeps places takes a minute for them."""
_TAG = "tag:yaml.org,2002:"
_MERGE = "<<"
MERGES = "<< merges mappings in YAML 1.1 alone"
"""What is told of it."""
_HALF = ("half of a surrogate pair, which is no character", "take it out")
Path = tuple[str | int, ...]
"""The keys and numbers that lead to a part of a document."""


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """A line and a column, both from 1."""

    line: int = 1
    column: int = 1


@dataclass(frozen=True, order=True, slots=True)
class Flaw:
    """Something in a document that cannot stay: where, what is wrong, and what would be right."""

    place: Position
    where: str
    """The part of the document, in its own words: `layout gpus, rule 2`."""
    what: str
    remedy: str

    def __str__(self) -> str:
        """`12:5: layout gpus, rule 2: unknown key 'drvier'; did you mean driver?`."""
        parts = [part for part in (self.where, self.what) if part]
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{self.place.line}:{self.place.column}: {': '.join(parts)}{remedy}"


@dataclass(frozen=True, slots=True)
class Wording:
    """What a kind of document is called in what is told of its text."""

    noun: str = "a layout"
    nouns: str = "layouts"
    start: str = "a layout begins with: version: vfiomgr/v1"
    """The remedy for an empty file."""
    several: str = "keep one, with all layouts by name below `layouts`"
    """The remedy for a second document."""
    reads_first: bool = False
    """Whether a second document is a flaw, and the first is read all the same."""
    merges: Literal["refused", "told", "taken"] = "refused"
    """What becomes of `<<`: a flaw; a flaw, and carried out all the same; carried out."""


class Unreadable(ValueError):  # noqa: N818 - what the text is, not that it is an error
    """A text that is no document; nothing more can be told of it than this flaw."""

    def __init__(self, flaw: Flaw) -> None:
        super().__init__(str(flaw))
        self.flaw = flaw


@dataclass(frozen=True, slots=True, eq=False)
class Located:
    """A value and its place; lists and mappings have their parts."""

    place: Position
    scalar: object = None
    """Of a scalar: what it means."""
    text: str = ""
    """Of a scalar: as it is written."""
    items: tuple[Located, ...] | None = None
    members: dict[str, Located] | None = None
    keys: dict[str, Position] = field(default_factory=dict)
    """Where the keys of the members are."""
    is_plain: bool = False
    """Of a scalar: whether it has no quotes, so that readers may take it for different things."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing, as after a key without a value."""
        return self.scalar is None and self.items is None and self.members is None

    @property
    def value(self) -> Any:  # noqa: ANN401 - as JSON has it
        """The same without places."""
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

    def descendants(self) -> Iterator[Located]:
        """This and all parts, from the start of the text to its end."""
        yield self
        for part in (*(self.items or ()), *(self.members or {}).values()):
            yield from part.descendants()


_LAYOUT = Wording()


def read_located(
    text: str, where: Callable[[Path], str], wording: Wording = _LAYOUT
) -> tuple[Located, list[Flaw]]:
    """What a text says, JSON or YAML 1.2, and what it says twice or not plainly.

    `where` calls a part of the document by its name, from the keys and numbers that lead to it.

    Raises:
        Unreadable: it is neither, or not one document.

    """
    nodes = _nodes(text, wording)
    flaws: list[Flaw] = []
    if len(nodes) > 1:
        place, what = _place(nodes[1]), "a second document begins here"
        if not wording.reads_first:
            _fail(place, what, wording.several)
        flaws.append(Flaw(place, "", what, wording.several))
    return _located(nodes[0], flaws, where, wording), flaws


def read_all_located(
    text: str, where: Callable[[Path], str], wording: Wording
) -> tuple[list[Located], list[Flaw]]:
    """The documents of a stream, as `read_located` reads one; empty ones are left out.

    Raises:
        Unreadable: it is none, or there is nothing in it.

    """
    flaws: list[Flaw] = []
    found = [_located(node, flaws, where, wording) for node in _nodes(text, wording)]
    documents = [document for document in found if not document.is_empty]
    if not documents:
        _fail(Position(), "the file is empty", wording.start)
    return documents, flaws


def _located(
    node: Any,  # noqa: ANN401 - nodes of ruamel have no types
    flaws: list[Flaw],
    where: Callable[[Path], str],
    wording: Wording,
) -> Located:
    try:
        return _Locator(flaws, where, wording).located(node, ())
    except RecursionError:
        _fail(Position(), "it is nested too deeply", _too_deep(wording))


def _nodes(text: str, wording: Wording) -> list[Any]:
    """The nodes of all documents, one at least; a text that is valid JSON is YAML 1.2, too."""
    if len(text) > _LONGEST:
        remedy = f"{wording.noun} needs no more than a few KiB: is it the right file?"
        _fail(Position(), f"it is larger than {_LONGEST >> 20} MiB", remedy)
    try:
        require_shallow(text)
    except Malformed as deep:
        _fail(Position(deep.line, deep.column), deep.why, _too_deep(wording))
    try:
        nodes = list(YAML(typ="safe", pure=True).compose_all(text))
    except (YAMLError, ValueError) as error:
        raise Unreadable(_syntax_flaw(error, text)) from None
    except RecursionError:
        _fail(Position(), "it is nested too deeply", _too_deep(wording))
    if not nodes:
        _fail(Position(), "the file is empty", wording.start)
    return nodes


def _too_deep(wording: Wording) -> str:
    return f"{wording.noun} needs no more than ten levels"


def _fail(place: Position, what: str, remedy: str) -> NoReturn:
    raise Unreadable(Flaw(place, "", what, remedy))


def _place(node: Any) -> Position:  # noqa: ANN401 - as above
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)


_SYNTAX = (
    ("character '\\t'", "a tab cannot indent", "indent with spaces"),
    ("undefined alias", "* begins an alias here", 'put a text with * into quotes: "*A40*"'),
    ("while scanning an alias", "* begins an alias here", 'put a text with * into quotes: "*A40*"'),
    ("character '@'", "no text begins with @", "put it into quotes"),
    ("character '`'", "no text begins with `", "put it into quotes"),
    ("character '%'", "no text begins with %", "put it into quotes"),
    ("mapping values are not allowed", "a second `:` in one value", "put the text into quotes"),
    ("quoted scalar", "a quote is not closed", "close it with the same quote"),
    ("flow", "a bracket or brace is not closed, or a comma is missing", "close it"),
    ("simple key", "a key without `:`", "write key: value, with a space after the colon"),
    ("block", "the indentation fits nothing above it", "give parts of one mapping one indentation"),
    ("second occurrence", "an anchor is defined twice", "give each anchor a name of its own"),
)
"""What a reader of YAML says, what that means here, and what helps."""


def _syntax_flaw(error: Exception, text: str) -> Flaw:
    """What is wrong with the text itself, in one line."""
    if text.lstrip().startswith("{"):
        try:
            parse_json(text)
        except Malformed as why:
            if why.line:
                what = f"neither JSON nor YAML: {why.why}"
                return Flaw(
                    Position(why.line, why.column), "", what, "mend it there, or just before"
                )
    said = f"{getattr(error, 'problem', None) or error} {getattr(error, 'context', None) or ''}"
    mark = getattr(error, "problem_mark", None)
    place = Position() if mark is None else Position(mark.line + 1, mark.column + 1)
    for part, what, remedy in _SYNTAX:
        if part in said:
            return Flaw(place, "", what, remedy)
    if hasattr(error, "position"):
        before = text[: error.position]
        place = Position(before.count("\n") + 1, len(before) - before.rfind("\n"))
        return Flaw(place, "", "a control character", "take it out")
    return Flaw(place, "", f"not YAML: {' '.join(said.split())}", "mend it there, or just before")


class _Locator:
    """Turns nodes into values with places; what is amiss is gathered in `flaws`."""

    def __init__(self, flaws: list[Flaw], where: Callable[[Path], str], wording: Wording) -> None:
        self._flaws = flaws
        self._where = where
        self._wording = wording
        self._constructor = YAML(typ="safe", pure=True).constructor
        self._above: list[int] = []
        self._count = 0

    def located(self, node: Any, path: Path) -> Located:  # noqa: ANN401 - as above
        self._count += 1
        if self._count > _MOST_NODES:
            _fail(
                _place(node),
                f"too much for {self._wording.noun}",
                "write less, or with fewer aliases",
            )
        if id(node) in self._above:
            _fail(_place(node), "an alias contains itself", "write out what is meant")
        if len(self._above) > _DEEPEST:
            what = f"it is nested deeper than {_DEEPEST} levels"
            _fail(_place(node), what, _too_deep(self._wording))
        self._above.append(id(node))
        found = self._read(node, path)
        self._above.pop()
        return found

    def _read(self, node: Any, path: Path) -> Located:  # noqa: ANN401 - as above
        if isinstance(node, ScalarNode):
            meant = self._scalar(node, path)
            return Located(_place(node), meant, str(node.value), is_plain=not node.style)
        if not str(node.tag).startswith(_TAG):
            self._add(node, path, f"the tag {node.tag}", self._no_tags)
        if isinstance(node, SequenceNode):
            items = (self.located(item, (*path, n)) for n, item in enumerate(node.value))
            return Located(_place(node), items=tuple(items))
        assert isinstance(node, MappingNode)  # noqa: S101 - there is no fourth kind of node
        return self._mapping(node, path)

    def _mapping(self, node: MappingNode, path: Path) -> Located:
        members: dict[str, Located] = {}
        keys: dict[str, Position] = {}
        merged: list[Located] = []
        for key, value in node.value:
            if isinstance(key, ScalarNode) and not is_sane(key.value):
                _fail(_place(key), *_HALF)
            if not isinstance(key, ScalarNode):
                self._add(key, path, "a list or mapping as a key", "a key is a text")
            elif key.value == _MERGE:
                if self._wording.merges != "taken":
                    self._add(key, path, MERGES, "write the keys out")
                if self._wording.merges != "refused":
                    found = self.located(value, path)
                    merged += found.items if found.items is not None else [found]
            elif key.value in keys:
                first = keys[key.value].line
                remedy = f"it stands in line {first} already: keep one"
                self._add(key, path, f"the key {key.value!r} twice", remedy)
            else:
                keys[key.value] = _place(key)
                members[key.value] = self.located(value, (*path, str(key.value)))
        for part in merged:
            for name, member in (part.members or {}).items():
                members.setdefault(name, member)
                keys.setdefault(name, part.keys[name])
        return Located(_place(node), members=members, keys=keys)

    def _scalar(self, node: ScalarNode, path: Path) -> object:
        kind = str(node.tag).removeprefix(_TAG)
        if not is_sane(node.value):
            _fail(_place(node), *_HALF)
        match kind:
            case "null":
                return None
            case "bool" | "int" | "float":
                return self._plain(node)
            case "str" | "timestamp":
                return node.value
        self._add(node, path, f"the tag {node.tag}", self._no_tags)
        return node.value

    def _plain(self, node: ScalarNode) -> object:
        try:
            found = self._constructor.construct_object(node)
        except (ValueError, LookupError):  # more digits than Python takes, or a tag that lies
            return node.value
        return found if is_sane(found) else node.value

    @property
    def _no_tags(self) -> str:
        return f"leave it out: {self._wording.nouns} have none"

    def _add(self, node: Any, path: Path, what: str, remedy: str) -> None:  # noqa: ANN401 - as above
        self._flaws.append(Flaw(_place(node), self._where(path), what, remedy))


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|[^\s{}\[\],:"]+')
_NEWLINE = re.compile("\n")


def read_json(text: str) -> Located | None:
    """What a text says; None where it is no JSON, or has a key twice, which only YAML tells of."""
    try:
        parse_json(text)
        return _Reader(text).read()
    except ValueError:
        return None


class _Reader:
    """Reads tokens of a text that is JSON."""

    def __init__(self, text: str) -> None:
        self._lines = [match.start() for match in _NEWLINE.finditer(text)]
        self._tokens: Iterator[re.Match[str]] = _TOKEN.finditer(text)

    def read(self) -> Located:
        return self._value(next(self._tokens))

    def _place(self, token: re.Match[str]) -> Position:
        line = bisect_left(self._lines, token.start())
        start = self._lines[line - 1] + 1 if line else 0
        return Position(line + 1, token.start() - start + 1)

    def _value(self, token: re.Match[str]) -> Located:
        text, place = token[0], self._place(token)
        if text == "{":
            return self._mapping(place)
        if text == "[":
            items: list[Located] = []
            while (item := next(self._tokens))[0] != "]":
                items.append(self._value(item))
            return Located(place, items=tuple(items))
        if text.startswith('"'):
            meant = _string(text)
            return Located(place, meant, meant)
        return Located(place, json.loads(text), text, is_plain=True)

    def _mapping(self, place: Position) -> Located:
        members: dict[str, Located] = {}
        keys: dict[str, Position] = {}
        while (token := next(self._tokens))[0] != "}":
            key = _string(token[0])
            if key in keys:
                message = f"{key} twice"
                raise ValueError(message)
            keys[key] = self._place(token)
            members[key] = self._value(next(self._tokens))
        return Located(place, members=members, keys=keys)


def _string(token: str) -> str:
    return str(json.loads(token)) if "\\" in token else token[1:-1]
