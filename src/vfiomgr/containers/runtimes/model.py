"""Container runtimes, the entry that one of them is given, and what was written for it."""

from __future__ import annotations

import json
import posixpath
import re
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from vfiomgr.documents.jsonable import to_jsonable
from vfiomgr.documents.parsed import parse_json
from vfiomgr.errors import InvalidDocument
from vfiomgr.paths import STATE, HostPath
from vfiomgr.value import Value
from vfiomgr.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterable


ProgramName = Literal["containerd", "crio", "docker", "k3s", "rke2"]
PROGRAMS: tuple[ProgramName, ...] = get_args(ProgramName)
Key = tuple[str, ...]
"""Where a value stands in a document: the names of the tables around it, and its own."""

RECORD = STATE / "runtimes.json"
_VERSION = "vfiomgr/v1"
_CHARACTER = r"(?:\\.|[^\\\]-])"
_PIECE = re.compile(
    rf"\\(?P<escaped>.)|\[(?P<negated>\^?)(?P<class>(?:{_CHARACTER}(?:-{_CHARACTER})?)+)\]|[^\\[]",
    re.DOTALL,
)
"""Of a pattern (path/filepath/match.go)."""
_RANGE = re.compile(rf"({_CHARACTER})(?:-({_CHARACTER}))?", re.DOTALL)


class RuntimeRequest(Value):
    """An entry for a runtime: a handler with a shim of its own, or an OCI runtime below runc's."""

    program: ProgramName
    name: str
    path: str
    """Of the shim, or of the OCI runtime."""
    config_path: str | None = None
    """The configuration that Kata's shim reads; None for a plain OCI runtime."""
    set_default: bool = False
    enable_cdi: bool = False

    @property
    def is_kata(self) -> bool:
        """Whether it is a handler of Kata's."""
        return self.config_path is not None

    @property
    def subject(self) -> str:
        """In a sentence: `the handler kata-vfio`."""
        return f"the {'handler' if self.is_kata else 'runtime'} {self.name}"


class ConfigFile(Value):
    """A file of a runtime's configuration, with every link to it followed."""

    path: HostPath
    text: str | None
    mode: int = 0o644


class MissingImport(Value):
    """A file that an import names, and that does not exist: containerd does not start."""

    importer: str
    path: str


class RuntimeFacts(Value):
    """What of a runtime decides how an entry is written for it."""

    version: Version | None
    main: ConfigFile
    """Where the runtime looks for its configuration, whether there is any or not."""
    drop_in: ConfigFile
    """vfiomgr's own file."""
    imported: tuple[ConfigFile, ...] = ()
    """What the main file brings in, in the order in which it is read."""
    imports: tuple[str, ...] = ()
    """The imports of the main file, as absolute paths and patterns."""
    missing: tuple[MissingImport, ...] = ()
    unsure: tuple[str, ...] = ()
    """Relative patterns that find different files in different releases which may be meant."""
    beside: tuple[HostPath, ...] = ()
    """Other files where drop-ins are, brought in or not."""
    effective: dict[str, Any] | None = None
    """What the runtime itself makes of it all; None where it cannot be asked."""
    is_dockers: bool = False
    """Whether Docker is there too, whose containerd serves no pods."""
    was_ours: bool = False
    """Whether an entry of the name was written by vfiomgr before, and is left out of all this."""


class Setting(Value):
    """A value that a document is to have; an `is_item` is one of a list."""

    key: Key
    value: Any
    is_item: bool = False
    is_shared: bool = False
    """Whether other entries need it as well."""


class OwnedKey(Value):
    """A value that was written, as JSON, and the one that it took the place of."""

    path: Key
    value: str
    before: str | None = None
    is_item: bool = False
    is_shared: bool = False


class OwnedFile(Value):
    """A file that was made or changed, whole as it was and as it became."""

    path: str
    before: str | None
    after: str
    keys: tuple[OwnedKey, ...] = ()
    backup: str | None = None
    made_directory: bool = False
    """Whether the directory around it was made for it."""


class InstalledRuntime(Value):
    """What is to be known of an entry, so that exactly that can be taken back."""

    program: str
    main: str
    """The runtime's own file: there may be two containerds on a host."""
    name: str
    files: tuple[OwnedFile, ...]

    def is_beside(self, other: InstalledRuntime) -> bool:
        """Whether both are in the files of one runtime."""
        return (self.program, self.main) == (other.program, other.main)


def render_record(installed: Iterable[InstalledRuntime]) -> str:
    """The record of all entries as a JSON document."""
    entries = to_jsonable(tuple(installed))
    document = {"api_version": _VERSION, "kind": "InstalledRuntimes", "entries": entries}
    return json.dumps(document, indent=2) + "\n"


def parse_record(text: str | None) -> tuple[InstalledRuntime, ...]:
    """The record that `render_record` wrote.

    Raises:
        InvalidDocument: it is none, or another version's.

    """
    if text is None:
        return ()
    try:
        document = parse_json(text)
        if document["api_version"] != _VERSION:
            message = f"api_version is {document['api_version']!r}"
            raise ValueError(message)
        return tuple(_installed(entry) for entry in document["entries"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"{RECORD} is no record of this vfiomgr: {error}"
        hint = (
            "put it back from a backup; without it nothing that was written is known as vfiomgr's"
        )
        raise InvalidDocument(message, hint) from None


def _installed(entry: dict[str, Any]) -> InstalledRuntime:
    files = (
        OwnedFile(**{**file, "keys": tuple(map(_owned_key, file["keys"]))})
        for file in entry["files"]
    )
    return InstalledRuntime(entry["program"], entry["main"], entry["name"], tuple(files))


def _owned_key(key: dict[str, Any]) -> OwnedKey:
    return OwnedKey(**{**key, "path": tuple(key["path"])})


def shown(key: Key) -> str:
    """A key as TOML has it: names that need it are quoted."""
    plain = (name.replace("-", "").replace("_", "").isalnum() for name in key)
    return ".".join(n if p else json.dumps(n) for n, p in zip(key, plain, strict=True))


def imports_of(data: dict[str, Any], place: str) -> tuple[str, ...]:
    """The imports of a file of containerd's.

    Raises:
        InvalidDocument: they are no list of texts.

    """
    told = data.get("imports", [])
    if not isinstance(told, list) or not all(isinstance(pattern, str) for pattern in told):
        message = f"imports in {place} is no list of texts: {json.dumps(told, default=str)}"
        raise InvalidDocument(message, 'mend it, e.g. imports = ["/etc/containerd/conf.d/*.toml"]')
    return tuple(told)


def absolute(pattern: str, importer: str, version: Version | None = None) -> str:
    """An import as containerd resolves it, against the directory of the file that contains it.

    Up to 1.6.28 and 1.7.15 a pattern is relative to the working directory of containerd, which is
    `/` under systemd (resolveImports in services/server/config/config.go).
    """
    if pattern.startswith("/"):
        return pattern
    is_of_root = is_pattern(pattern) and version is not None and _globs_working_directory(version)
    return f"{'' if is_of_root else HostPath(importer).parent}/{pattern}"


def _globs_working_directory(version: Version) -> bool:
    return version < Version(1, 6, 29) or Version(1, 7) <= version < Version(1, 7, 16)


def depends_on_release(pattern: str) -> bool:
    """Whether releases of containerd 1.6 and 1.7 resolve an import against other directories."""
    return is_pattern(pattern) and not pattern.startswith("/")


def covers(pattern: str, path: str) -> bool:
    """Whether an import finds a path: a pattern of Go's filepath.Glob, where it has a `*`."""
    names, wanted = posixpath.normpath(path).split("/"), posixpath.normpath(pattern).split("/")
    if not is_pattern(pattern):
        return names == wanted
    return len(names) == len(wanted) and all(map(matches, wanted, names))


def is_pattern(text: str) -> bool:
    """Whether containerd takes an import for a pattern (resolveImports)."""
    return "*" in text


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of Go's filepath.Match finds a name without slashes; a bad one does not."""
    expression = _expression(pattern)
    return expression is not None and expression.fullmatch(name) is not None


@cache
def _expression(pattern: str) -> re.Pattern[str] | None:
    parts, place = [], 0
    for found in _PIECE.finditer(pattern):
        if found.start() != place:
            return None
        place = found.end()
        if found["escaped"]:
            parts.append(re.escape(found["escaped"]))
        elif found["class"]:
            parts.append(_class(found["class"], is_negated=bool(found["negated"])))
        else:
            parts.append({"*": ".*", "?": "."}.get(found[0], re.escape(found[0])))
    return re.compile("".join(parts), re.DOTALL) if place == len(pattern) else None


def _class(text: str, *, is_negated: bool) -> str:
    """A class of characters; of a range whose ends are the wrong way round nothing is in it."""
    ranges = []
    for low, high in _RANGE.findall(text):
        start, stop = low[-1], high[-1:] or low[-1]
        if start <= stop:
            ranges.append(f"{re.escape(start)}-{re.escape(stop)}")
    if not ranges:
        return "." if is_negated else "(?!)"
    return f"[{'^' if is_negated else ''}{''.join(ranges)}]"
