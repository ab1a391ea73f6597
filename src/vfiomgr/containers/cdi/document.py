"""CDI specifications as text: consumers read JSON as YAML too."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from vfiomgr.containers.cdi.grammar import KEYS, TOP, Family, Key, scalar_of, text_of
from vfiomgr.containers.cdi.model import (
    CdiDevice,
    CdiDeviceNode,
    CdiEdits,
    CdiHook,
    CdiIntelRdt,
    CdiMount,
    CdiNetDevice,
    CdiOddity,
    CdiSpecification,
    fault,
)
from vfiomgr.documents.reader import Unreadable, Wording, read_located
from vfiomgr.documents.text import Path, shown_path
from vfiomgr.paths import HostPath

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vfiomgr.containers.cdi.model import CdiFile
    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.documents.text import Located

_MOST_GUESSED = 100
"""Maximum number of errors of a file for which a similar key is suggested."""
_FORMS = {
    "text": "a string",
    "number": "an integer",
    "truth": "true or false",
    "texts": "a list of strings",
    "numbers": "a list of integers",
    "strings by key": "keys with a string each",
    "part": "keys with values",
    "parts": "a list",
}


_PARTS: dict[str, Callable[..., Any]] = {
    TOP: CdiSpecification,
    "device": CdiDevice,
    "edits": CdiEdits,
    "deviceNode": CdiDeviceNode,
    "mount": CdiMount,
    "hook": CdiHook,
    "netDevice": CdiNetDevice,
    "intelRdt": CdiIntelRdt,
}
"""The types of each table's keys."""


def read_file(file: CdiFile, family: Family = "go") -> CdiSpecification:
    """A file as a library reads it; the reason is the only oddity if it is not readable."""
    if file.text is not None:
        return parse_specification(file.text, HostPath(file.path), family)
    why = CdiOddity((), fault("unreadable", 1, file.why or "not readable", "make it readable text"))
    return CdiSpecification("", "", file=HostPath(file.path), oddities=(why,))


def is_readable(specification: CdiSpecification) -> bool:
    """Whether a file is a document."""
    return bool(specification.lines)


def parse_specification(
    text: str, file: HostPath | None = None, family: Family = "go"
) -> CdiSpecification:
    """Read a JSON or YAML text; what values cannot hold is in `oddities`.

    For an invalid document the reason is the only oddity.
    """
    return replace(_specification(text, family), file=file)


@lru_cache(maxsize=64)
def _specification(text: str, family: Family) -> CdiSpecification:
    """A text as a library reads it, which several consumers and commands use."""
    try:
        document, flaws = _document(text)
    except Unreadable as error:
        return CdiSpecification("", "", oddities=(CdiOddity((), error.flaw),))
    reader = _Reader(family)
    for found in flaws:
        reader.add_flaw(found)
    read: CdiSpecification = reader.part(document, TOP, ())
    oddities = tuple(sorted(reader.oddities, key=lambda oddity: oddity.found.line))
    return replace(read, oddities=oddities, lines=reader.lines)


@lru_cache(maxsize=64)
def _document(text: str) -> tuple[Located, list[Diagnostic]]:
    """A text with line numbers, which the libraries read differently."""
    wording = Wording(
        "a specification",
        "specifications",
        shown_path,
        'start with: cdiVersion: "0.5.0"',
        "write each into its own file",
        reads_first=True,
        merges="told",
    )
    return read_located(text, wording)


class _Reader(Struct):
    """Takes what matches the keys from a document, and collects the rest."""

    family: Family
    oddities: list[CdiOddity] = field(default_factory=list)
    lines: dict[Path, int] = field(default_factory=dict)

    def add(self, rule: str, path: Path, line: int, what: str, remedy: str) -> None:
        self.oddities.append(CdiOddity(path, fault(rule, line, what, remedy)))

    def add_flaw(self, found: Diagnostic) -> None:
        """Add a problem of the text itself; tags are ignored by all consumers.

        serde_yaml treats `<<` like any other key.
        """
        if found.rule == "yaml-tag" or (found.rule == "key-merged" and self.family != "rust"):
            return
        what = f"{found.subject}: {found.summary}" if found.subject else found.summary
        self.add(found.rule, (), found.line, what, found.remedy)

    def part(self, part: Located, table: str, path: Path) -> Any:  # noqa: ANN401 - as the table says
        """The value of a mapping."""
        keys = KEYS[table]
        found: dict[str, Any] = {
            key.field or name: "" for name, key in keys.items() if key.needed and key.form == "text"
        }
        if part.members is None:
            self._wrong(part, path, "part")
            return _PARTS[table](**found)
        for written, value in part.members.items():
            line = part.keys[written].line
            name = written if written in keys else self._strange((*path, written), keys, line)
            here = (*path, name or written)
            self.lines[here] = line
            if name is not None and not value.is_empty:
                found[keys[name].field or name] = self._value(value, keys[name], here)
        there = {written.lower() for written in part.members}
        for name, key in keys.items():
            if key.needed and name.lower() not in there:
                what = f"{shown_path(path) or 'the specification'} has no {name}"
                self.add("key-missing", (*path, name), part.place.line, what, f"add {name}")
        return _PARTS[table](**found)

    def _strange(self, path: Path, keys: Mapping[str, Key], line: int) -> str | None:
        """The key that is meant by one in another case; of others, what they could have been."""
        import difflib  # noqa: PLC0415 - slow, and few need it

        written = str(path[-1])
        for name in keys:
            if name.lower() == written.lower():
                what = f"{shown_path(path)} must be written {name}"
                self.add("key-case", path, line, what, f"write {name}")
                return name
        is_early = len(self.oddities) < _MOST_GUESSED
        near = difflib.get_close_matches(written, keys, 1) if is_early else []
        remedy = (
            f"did you mean {near[0]}?" if near else f"remove it; known keys are {', '.join(keys)}"
        )
        self.add("key-unknown", path, line, f"{shown_path(path)} is not a CDI key", remedy)
        return None

    def _value(self, value: Located, key: Key, path: Path) -> Any:  # noqa: ANN401 - as the key says
        match key.form:
            case "part":
                found: object = self.part(value, key.of, path)
            case "parts":
                items = self._items(value, path)
                found = tuple(self.part(item, key.of, at) for at, item in items)
            case "texts":
                found = tuple(self._text(item, at) for at, item in self._items(value, path))
            case "numbers":
                numbers = [self._number(item, at, key) for at, item in self._items(value, path)]
                found = tuple(number for number in numbers if number is not None)
            case "strings by key":
                found = self._texts_by_key(value, path)
            case "number":
                found = self._number(value, path, key)
            case "truth":
                found = self._truth(value, path)
            case "text":
                found = self._text(value, path)
        return found

    def _items(self, value: Located, path: Path) -> list[tuple[Path, Located]]:
        if value.items is None:
            self._wrong(value, path, "parts")
        items = [((*path, number), item) for number, item in enumerate(value.items or ())]
        self.lines.update((at, item.place.line) for at, item in items)
        return items

    def _texts_by_key(self, value: Located, path: Path) -> tuple[tuple[str, str], ...]:
        if value.members is None:
            self._wrong(value, path, "strings by key")
        members = (value.members or {}).items()
        return tuple((key, self._text(item, (*path, key))) for key, item in members)

    def _text(self, value: Located, path: Path) -> str:
        """Libraries accept a number or a boolean as a string; in Go it is reformatted."""
        if value.items is not None or value.members is not None:
            self._wrong(value, path, "text")
        return text_of(value.text, self.family) if value.is_plain else value.text

    def _scalar(self, value: Located) -> object:
        return scalar_of(value.text, self.family) if value.is_plain else value.scalar

    def _number(self, value: Located, path: Path, key: Key) -> int | None:
        number = self._scalar(value)
        if isinstance(number, float) and number.is_integer():
            number = int(number)  # only Go has any: it writes it as JSON, and reads that
        if isinstance(number, int) and not isinstance(number, bool):
            low, high = (0, 2**32) if key.is_natural else (-(2**63), 2**63)
            if low <= number < high:
                return number
        self._wrong(value, path, "number")
        return None

    def _truth(self, value: Located, path: Path) -> bool | None:
        truth = self._scalar(value)
        if isinstance(truth, bool):
            return truth
        self._wrong(value, path, "truth")
        return None

    def _wrong(self, value: Located, path: Path, form: str) -> None:
        what = f"{shown_path(path) or 'the specification'} is not {_FORMS[form]}"
        self.add("type-wrong", path, value.place.line, what, f"write {_FORMS[form]}")


def render_specification(specification: CdiSpecification) -> str:
    """The text of a file, with only the keys that are used."""
    import json  # noqa: PLC0415 - slow to import

    return json.dumps(document_of(specification), indent=2) + "\n"


def document_of(specification: CdiSpecification) -> dict[str, Any]:
    """A specification as lists, dictionaries and scalars."""
    return _written(specification, TOP)


def _written(part: object, table: str) -> dict[str, Any]:
    """The keys of a part that have a value."""
    values = {
        name: _value_written(getattr(part, key.field or name), key)
        for name, key in KEYS[table].items()
    }
    return {name: value for name, value in values.items() if value not in (None, "", [], {})}


def _value_written(value: Any, key: Key) -> object:  # noqa: ANN401 - as the key says
    match key.form:
        case "part":
            return None if value is None else _written(value, key.of)
        case "parts":
            return [_written(item, key.of) for item in value]
        case "texts" | "numbers":
            return list(value)
        case "strings by key":
            return dict(value)
    return value
