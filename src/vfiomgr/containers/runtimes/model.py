"""Container runtimes, their files, and an entry for one of them."""

from __future__ import annotations

import json
import posixpath
import re
from functools import cache
from typing import Any, Literal, get_args

from vfiomgr.errors import InvalidDocument
from vfiomgr.expressions import expression
from vfiomgr.paths import HostPath
from vfiomgr.units import Version
from vfiomgr.value import Value

ProgramName = Literal["containerd", "crio", "docker", "k3s", "rke2"]
PROGRAMS: tuple[ProgramName, ...] = get_args(ProgramName)
Key = tuple[str, ...]
"""The key of a value in a document: the names of the tables around it, and its own."""
Texts = dict[str, str | None]
"""The planned content of files by path; others are unchanged."""

_CHARACTER = r"(?:\\.|[^\\\]-])"
_PIECE = expression(
    rf"\\(?P<escaped>.)|\[(?P<negated>\^?)(?P<class>(?:{_CHARACTER}(?:-{_CHARACTER})?)+)\]|[^\\[]",
    re.DOTALL,
)
"""The special characters of a pattern (path/filepath/match.go)."""
_RANGE = expression(rf"({_CHARACTER})(?:-({_CHARACTER}))?", re.DOTALL)


class RuntimeRequest(Value):
    """An entry for a runtime: a handler with its own shim, or an OCI runtime with runc's shim."""

    program: ProgramName
    name: str
    path: str
    """The path of the shim, or of the OCI runtime."""
    config_path: str | None = None
    """The configuration for Kata's shim; None for another OCI runtime."""
    set_default: bool = False
    enable_cdi: bool = False

    @property
    def is_kata(self) -> bool:
        """Whether it is a Kata handler."""
        return self.config_path is not None

    @property
    def subject(self) -> str:
        """Its name in messages: `handler kata-vfio`."""
        return f"{'handler' if self.is_kata else 'runtime'} {self.name}"


class ConfigFile(Value):
    """A file of a runtime's configuration, with all links resolved."""

    path: HostPath
    text: str | None
    mode: int = 0o644


class MissingImport(Value):
    """An imported file that does not exist: containerd does not start."""

    importer: str
    path: str


class RuntimeFacts(Value):
    """The facts of a runtime that determine how to write an entry."""

    version: Version | None
    main: ConfigFile
    """The place of the runtime's configuration, whether it exists or not."""
    drop_in: ConfigFile
    """vfiomgr's own file."""
    imported: tuple[ConfigFile, ...] = ()
    """The imported files of the main file, in reading order."""
    imports: tuple[str, ...] = ()
    """The imports of the main file, as absolute paths and patterns."""
    missing: tuple[MissingImport, ...] = ()
    unsure: tuple[str, ...] = ()
    """Relative patterns that match different files in the possible releases."""
    beside: tuple[HostPath, ...] = ()
    """Other files in the drop-in directories, imported or not."""
    effective: dict[str, Any] | None = None
    """The settings that the runtime itself reads; None if it cannot be queried."""
    is_dockers: bool = False
    """Whether Docker is also installed, whose containerd serves no pods."""
    distribution: Version | None = None
    """The release of k3s or rke2 itself; None if unknown."""
    rootless: tuple[HostPath, ...] = ()
    """Files that the rootless Docker of a user reads instead of the main one."""
    was_ours: bool = False
    """Whether vfiomgr wrote an entry of this name before, which is ignored here."""


class Setting(Value):
    """A value for a document; an `is_item` is an item of a list."""

    key: Key
    value: Any
    is_item: bool = False
    is_shared: bool = False
    """Whether other entries also need it."""


def shown(key: Key) -> str:
    """A key as in TOML, with quotes if needed."""
    plain = (name.replace("-", "").replace("_", "").isalnum() for name in key)
    return ".".join(n if p else json.dumps(n) for n, p in zip(key, plain, strict=True))


def imports_of(data: dict[str, Any], place: str) -> tuple[str, ...]:
    """The imports of a containerd file.

    Raises:
        InvalidDocument: they are not a list of strings.
    """
    told = data.get("imports", [])
    if not isinstance(told, list) or not all(isinstance(pattern, str) for pattern in told):
        message = f"imports in {place} is not a list of strings: {json.dumps(told, default=str)}"
        raise InvalidDocument(
            message, 'correct it, e.g. imports = ["/etc/containerd/conf.d/*.toml"]'
        )
    return tuple(told)


def absolute(pattern: str, importer: str, version: Version | None = None) -> str:
    """An import as containerd resolves it, against the directory of its file.

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
    """Whether releases of containerd 1.6 and 1.7 resolve an import differently."""
    return is_pattern(pattern) and not pattern.startswith("/")


def covers(pattern: str, path: str) -> bool:
    """Whether an import matches a path: as a pattern of Go's filepath.Glob if it has a `*`."""
    names, wanted = posixpath.normpath(path).split("/"), posixpath.normpath(pattern).split("/")
    if not is_pattern(pattern):
        return names == wanted
    return len(names) == len(wanted) and all(map(matches, wanted, names))


def is_pattern(text: str) -> bool:
    """Whether containerd treats an import as a pattern (resolveImports)."""
    return "*" in text


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of Go's filepath.Match matches a name without slashes."""
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
    """A character class; a range with its ends reversed matches nothing."""
    ranges = []
    for low, high in _RANGE.findall(text):
        start, stop = low[-1], high[-1:] or low[-1]
        if start <= stop:
            ranges.append(f"{re.escape(start)}-{re.escape(stop)}")
    if not ranges:
        return "." if is_negated else "(?!)"
    return f"[{'^' if is_negated else ''}{''.join(ranges)}]"
