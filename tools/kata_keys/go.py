"""Keys of the Go runtime: the toml tags of the structs that it decodes its files into."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tools.kata_keys.found import Configuration, Form, UnreadableSourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOURCE = "src/runtime/pkg/katautils/config.go"
ANNOTATIONS = "src/runtime/virtcontainers/pkg/annotations/annotations.go"
_MODULE = "github.com/kata-containers/kata-containers/"
_ROOT = "tomlConfig"
_STRUCT = re.compile(r"^type (\w+) struct \{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r'\s*(\w+)\s+(\S+)(?:\s+`toml:"([^"]+)"`)?\s*(?://.*)?')
_IMPORT = re.compile(r'^\s+(?:(\w+) )?"([^"]+)"$', re.MULTILINE)
_INTEGER = re.compile(r"(u?)int(8|16|32|64)?")
_MAP = "map[string]"
_ANNOTATION = re.compile(r'= kataAnnotHypervisorPrefix \+ "([^"]+)"')


def read_go(text: str, annotations: str, package: Callable[[str], str]) -> Configuration:
    """What the texts of `SOURCE` and `ANNOTATIONS` say.

    `package` gives the text of all Go files of a directory.

    Raises:
        UnreadableSourceError: a field is of a type that is not understood.

    """
    reader = _Reader(text, package)
    for name, kind, _ in reader.fields(_ROOT):
        reader.read_section(name.lower(), kind.removeprefix(_MAP))
    reader.found.annotations |= set(_ANNOTATION.findall(annotations))
    return reader.found


class _Reader:
    def __init__(self, text: str, package: Callable[[str], str]) -> None:
        self.structs = {match[1]: match[2] for match in _STRUCT.finditer(text)}
        imports = (
            (alias or path.rpartition("/")[2], path) for alias, path in _IMPORT.findall(text)
        )
        self.imports = dict(imports)
        self.package = package
        self.found = Configuration()

    def fields(self, struct: str) -> Iterator[tuple[str, str, str]]:
        """Name, type and tag of the fields of a struct."""
        if struct not in self.structs:
            message = f"{SOURCE} has no struct {struct}"
            raise UnreadableSourceError(message)
        for line in self.structs[struct].splitlines():
            if not line.strip() or line.strip().startswith("//"):
                continue
            match = _FIELD.fullmatch(line)
            if match is None:
                message = f"{SOURCE}, struct {struct}: {line.strip()}"
                raise UnreadableSourceError(message)
            yield match[1], match[2], match[3] or ""

    def read_section(self, section: str, struct: str) -> None:
        for name, kind, tag in self.fields(struct):
            key = tag or name.lower()
            if kind in self.structs:
                self.read_section(f"{section}.{key}", kind)
            else:
                self.found.add(section, key, self.form(kind))

    def form(self, kind: str) -> Form:
        kind = kind.removeprefix("*")
        integer = _INTEGER.fullmatch(kind)
        if integer is not None:
            return Form("integer", _range(integer[1], integer[2] or "64"))
        if kind.startswith("[]"):
            return Form("tables") if kind[2:] in self.structs else _array(self.form(kind[2:]))
        simple = {"string": "string", "bool": "boolean", "float32": "number", "float64": "number"}
        return Form(simple[kind]) if kind in simple else self.form(self.underlying(kind))

    def underlying(self, kind: str) -> str:
        """What a named type of another package of Kata's is."""
        package, _, name = kind.partition(".")
        path = self.imports.get(package, "")
        declared = None
        if path.startswith(_MODULE):
            text = self.package(path.removeprefix(_MODULE))
            declared = re.search(rf"^type {name} (\w+)$", text, re.MULTILINE)
        if declared is None:
            message = f"{SOURCE}: the type {kind} is not known"
            raise UnreadableSourceError(message)
        return declared[1]


def _range(sign: str, bits: str) -> str:
    """What the decoder checks: of 64 bits nothing, a negative number in a uint64 included."""
    return "" if bits == "64" else f"{sign or 'i'}{bits}"


def _array(item: Form) -> Form:
    if item.type != "string":
        message = f"{SOURCE}: an array of {item.type}"
        raise UnreadableSourceError(message)
    return Form("strings")
