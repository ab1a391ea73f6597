"""Keys of runtime-rs: the fields of the structs that serde fills, with their attributes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tools.kata_keys.found import Configuration, Form, UnreadableSourceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

SOURCES = "src/libs/kata-types/src/config"
ANNOTATIONS = "src/libs/kata-types/src/annotations/mod.rs"
_OF_VENDORS = "vendor.rs"
"""How files end that no build of Kata's own has (the feature enable-vendor)."""
_ROOT = "TomlConfig"
_TEXT_OR_COMMENT = re.compile(
    r"""(?P<text> r(?P<hashes>\#*)".*?"(?P=hashes) | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])' )
        | //[^\n]* | /\*.*?\*/""",
    re.DOTALL | re.VERBOSE,
)
_ATTRIBUTES = r"((?:\#\[[^\]]*\]\s*)*)"
_STRUCT = re.compile(
    rf"^[ \t]*{_ATTRIBUTES}(?:pub(?:\(\w+\))?\s+)?struct\s+(\w+)\s*\{{([^{{}}]*)\}}",
    re.MULTILINE,
)
_FIELD = re.compile(
    rf"\s*{_ATTRIBUTES}(?:pub(?:\(\w+\))?\s+)?(\w+)\s*:\s*"
    r"((?:[^,<>]|<(?:[^<>]|<[^<>]*>)*>)+?)\s*(?:,|$)\s*"
)
_ENUM = re.compile(r"\benum\s+(\w+)")
_SERDE = re.compile(r"\#\[serde\(([^\]]*)\)\]")
_ARGUMENT = re.compile(r'\s*(\w+)(?:\s*=\s*"([^"]*)")?\s*,?\s*')
_OF_FIELDS = {"default", "rename", "alias", "flatten", "deserialize_with"}
_OF_STRUCTS = {"default", "deny_unknown_fields"}
_UNITS = {"": "ms", "deserialize_secs_to_millis": "s"}
"""What a number in a field of milliseconds is in the file, by the function that reads it."""
_SIMPLE = {"String": "string", "bool": "boolean", "f32": "number", "f64": "number"}
_INTEGER = re.compile(r"([ui])(8|16|32|64|size)")
_ANNOTATION = re.compile(
    r'const (\w+): &str\s*=\s*"io\.katacontainers\.config\.hypervisor\.([^"]+)"'
)
_MATCHER = "fn update_config_by_annotation"
_ARM = re.compile(r"\b([A-Z][A-Z0-9_]+)\s*(?:\||=>)")
_WRAPPED = re.compile(r"(\w+)<(.*)>")


def read_rust(files: Mapping[str, str], annotations: str) -> Configuration:
    """What the files below `SOURCES` and the text of `ANNOTATIONS` say.

    Raises:
        UnreadableSourceError: a field has a type or an attribute that is not understood.

    """
    own = (text for path, text in files.items() if not path.endswith(_OF_VENDORS))
    reader = _Reader(map(_without_comments, own))
    for field in reader.fields(_ROOT):
        (_, kind) = _unwrapped(field.kind)
        reader.read_section(field.keys[0], kind.rpartition(",")[2].strip() or field.kind)
    reader.found.annotations |= set(_annotations(annotations))
    return reader.found


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    kind: str
    arguments: dict[str, str]
    """Of serde's attributes; those without a value have an empty one."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The names that serde takes, the first one first."""
        alias = self.arguments.get("alias")
        return (self.arguments.get("rename", self.name), *([alias] if alias else ()))

    @property
    def unit(self) -> str:
        """Of a field of milliseconds whose key does not say so."""
        if not self.name.endswith("_ms") or self.keys[0].endswith("_ms"):
            return ""
        return _UNITS[self.arguments.get("deserialize_with", "")]


class _Reader:
    def __init__(self, texts: Iterable[str]) -> None:
        self.structs: dict[str, set[tuple[str, str]]] = {}
        self.enums: set[str] = set()
        for text in texts:
            self.enums |= set(_ENUM.findall(text))
            for attributes, name, body in _STRUCT.findall(text):
                self.structs.setdefault(name, set()).add((attributes, body.strip()))
        self.found = Configuration()

    def fields(self, struct: str) -> list[_Field]:
        """The fields of a struct."""
        (_, body) = self._only(struct)
        found, end = [], 0
        for match in _FIELD.finditer(body):
            if match.start() != end or _SERDE.sub("", match[1]).strip():
                break
            end = match.end()
            found.append(_Field(match[2], match[3], _arguments(match[1], _OF_FIELDS, struct)))
        if end != len(body):
            message = f"struct {struct}: {body[end : end + 80]!r}"
            raise UnreadableSourceError(message)
        return found

    def _only(self, struct: str) -> tuple[str, str]:
        """The attributes and the body of a struct."""
        declared = self.structs.get(struct, set())
        if len(declared) != 1:
            message = f"{len(declared)} structs {struct} below {SOURCES}"
            raise UnreadableSourceError(message)
        return next(iter(declared))

    def read_section(self, section: str, struct: str) -> None:
        """Take the keys of a struct, and of what is flattened into it."""
        (attributes, _) = self._only(struct)
        if "deny_unknown_fields" in _arguments(attributes, _OF_STRUCTS, struct):
            self.found.strict.add(section)
        for field in self.fields(struct):
            inner = _unwrapped(field.kind)[1] or field.kind
            if "flatten" in field.arguments:
                self.read_section(section, inner)
            elif inner in self.structs and not field.kind.startswith("Vec<"):
                self.read_section(f"{section}.{field.keys[0]}", inner)
            else:
                for key in field.keys:
                    form = self.form(field.kind)
                    self.found.add(section, key, Form(form.type, form.range, field.unit))

    def form(self, kind: str) -> Form:
        """How values of a type are written."""
        outer, inner = _unwrapped(kind)
        integer = _INTEGER.fullmatch(kind)
        if outer == "Option":
            return self.form(inner)
        if outer == "Vec":
            return self._array(inner)
        if integer is not None:
            width = f"{integer[1]}{integer[2].replace('size', '64')}"
            return Form("integer", "" if width == "i64" else width)
        if kind in self.enums:
            return Form("string")
        if kind not in _SIMPLE:
            message = f"the type {kind} is not known"
            raise UnreadableSourceError(message)
        return Form(_SIMPLE[kind])

    def _array(self, kind: str) -> Form:
        if kind in self.structs:
            return Form("tables")
        item = self.form(kind)
        if item.type not in ("string", "integer"):
            message = f"an array of {kind}"
            raise UnreadableSourceError(message)
        return Form(f"{item.type}s", item.range)


def _annotations(text: str) -> Iterator[str]:
    """The names that have an arm in the function that sets keys by them; others are an error."""
    names = dict(_ANNOTATION.findall(text))
    _, matcher, body = _without_comments(text).partition(_MATCHER)
    if not matcher:
        message = f"{ANNOTATIONS} has no {_MATCHER}"
        raise UnreadableSourceError(message)
    yield from (names[constant] for constant in _ARM.findall(body) if constant in names)


def _without_comments(text: str) -> str:
    return _TEXT_OR_COMMENT.sub(lambda match: match["text"] or " ", text)


def _unwrapped(kind: str) -> tuple[str, str]:
    """`("Option", "u32")` of `Option<u32>`; two empty texts of what has no parameter."""
    match = _WRAPPED.fullmatch(kind)
    return (match[1], match[2]) if match is not None else ("", "")


def _arguments(attributes: str, known: set[str], struct: str) -> dict[str, str]:
    found = {
        name: value
        for arguments in _SERDE.findall(attributes)
        for name, value in _ARGUMENT.findall(arguments)
    }
    if not found.keys() <= known:
        message = f"struct {struct}: serde's {', '.join(sorted(found.keys() - known))}"
        raise UnreadableSourceError(message)
    return found
