"""The installed container runtimes, their files, and the configuration as they read it.

Planned files are shown to the program in a private directory.
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
import tempfile
from typing import TYPE_CHECKING, Any

from msgspec import field

from vfiomgr.containers.runtimes import other_runtimes, text, values
from vfiomgr.containers.runtimes.containerd import CRI_NAMES
from vfiomgr.containers.runtimes.model import (
    ConfigFile,
    MissingImport,
    absolute,
    covers,
    imports_of,
    is_pattern,
    matches,
)
from vfiomgr.documents.text import Malformed, parse_toml
from vfiomgr.errors import HostError, InvalidDocument, UsageError
from vfiomgr.expressions import expression
from vfiomgr.host.tree import HostTree
from vfiomgr.paths import HostPath
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from vfiomgr.containers.runtimes.model import Key, ProgramName
    from vfiomgr.host.programs import ProgramAnswer


_KEYS: dict[ProgramName, tuple[Key, ...]] = {
    "containerd": tuple(("plugins", cri, "containerd", "runtimes") for cri in CRI_NAMES),
    "crio": (("crio", "runtime", "runtimes"),),
    "docker": (("runtimes",),),
}


def has_entry(file: ConfigFile, program: str, name: str) -> bool:
    """Whether the entry exists.

    Raises:
        InvalidDocument: the file is not readable.

    """
    if file.text is None:
        return False
    if program not in _KEYS:
        return other_runtimes.has_runtime(file.text, name)
    data = text.parse(file.text, file.path)
    return any(values.found(data, (*key, name)) is not values.ABSENT for key in _KEYS[program])


_BIN = ("/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin", "/bin", "/sbin")
_PROGRAMS: dict[ProgramName, str] = {
    "containerd": "containerd",
    "crio": "crio",
    "docker": "dockerd",
    "k3s": "k3s",
    "rke2": "rke2",
}
_PACKAGES: dict[ProgramName, tuple[str, ...]] = {
    "containerd": ("containerd.io", "containerd"),
    "crio": ("cri-o",),
    "docker": ("docker-ce", "docker.io"),
}
_MAIN: dict[ProgramName, HostPath] = {
    "containerd": HostPath("/etc/containerd/config.toml"),
    "crio": HostPath("/etc/crio/crio.conf"),
    "docker": HostPath("/etc/docker/daemon.json"),
    "k3s": HostPath("/var/lib/rancher/k3s/agent/etc/containerd/config.toml"),
    "rke2": HostPath("/var/lib/rancher/rke2/agent/etc/containerd/config.toml"),
}
_WITH_CONTAINERD_2 = (Version(1, 31, 6), Version(1, 32, 2))
"""The releases of k3s and rke2 in which containerd 2 came to those branches."""
_DPKG = HostPath("/var/lib/dpkg/status")
_MAGIC = frozenset("*?[\\")
_SECONDS = 10.0


def main_file(program: ProgramName) -> HostPath:
    """The default place of a runtime's configuration."""
    return _MAIN[program]


def present(tree: HostTree) -> tuple[ProgramName, ...]:
    """The container runtimes that are installed or configured here."""
    return tuple(name for name in _PROGRAMS if _is_present(tree, name))


def _is_present(tree: HostTree, name: ProgramName) -> bool:
    if any(tree.exists(HostPath(f"{place}/{_PROGRAMS[name]}")) for place in _BIN):
        return True
    if name in ("k3s", "rke2"):
        return tree.exists(_MAIN[name].parent)
    return tree.exists(_MAIN[name]) or (name == "crio" and tree.exists(_MAIN[name].parent))


def read_version(tree: HostTree, name: ProgramName) -> Version | None:
    """The version that a runtime prints, or that of its package in the tree; None if unknown.

    For k3s and rke2 it is the version of their containerd.
    """
    if not tree.runs_programs:
        return packaged(tree, _PACKAGES.get(name, ()))
    told = tree.run((_PROGRAMS[name], "--version"), _SECONDS)
    version = None if told is None else _version_in(told)
    if version is None or name not in ("k3s", "rke2"):
        return version
    is_new = version >= Version(1, 33) or any(
        start <= version < Version(1, start.minor + 1) for start in _WITH_CONTAINERD_2
    )
    return Version(2, 0) if is_new else Version(1, 7)


def _version_in(text: str) -> Version | None:
    """The first word that is a version; `…/containerd/v2` is part of a name."""
    for word in text.split():
        if re.match(r"v?\d+\.\d+", word):
            try:
                return Version.parse(word)
            except UsageError:
                continue
    return None


def packaged(tree: HostTree, packages: Iterable[str]) -> Version | None:
    """A version from dpkg's status (deb-version(7)), without its epoch."""
    text = tree.read_text(_DPKG) or ""
    for package in packages:
        for paragraph in text.split("\n\n"):
            fields = dict(line.partition(":")[::2] for line in paragraph.splitlines())
            if fields.get("Package", "").strip() == package and "installed" in fields.get(
                "Status", ""
            ):
                version = fields.get("Version", "").strip()
                return _version_in(version.partition(":")[2] or version)
    return None


def read_config(tree: HostTree, path: HostPath) -> ConfigFile:
    """A file, with all links resolved.

    Raises:
        InvalidDocument: it exists, but is not readable text.

    """
    place = tree.followed(path)
    status = tree.status(place)
    if status is not None and not stat.S_ISREG(status.st_mode):
        message = f"{place} is not a regular file"
        raise InvalidDocument(
            message, "replace it by a regular file; vfiomgr changes no other files"
        )
    data = tree.read_whole(place)
    if data is None:
        if tree.exists(place):
            message = f"cannot read {place}"
            raise InvalidDocument(message, "run as root")
        return ConfigFile(place, None)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        message = f"{place} is not UTF-8"
        raise InvalidDocument(message, "save it as UTF-8; nothing was changed") from None
    access = tree.status(place)
    return ConfigFile(place, text, 0o644 if access is None else access.st_mode & 0o7777)


class Imports(Value):
    """The imported files of a main file, including nested imports."""

    paths: tuple[HostPath, ...] = ()
    """In the reading order of containerd."""
    missing: tuple[MissingImport, ...] = ()


def imported(
    tree: HostTree,
    main: HostPath,
    imports_of: Callable[[HostPath], Iterable[str]],
    version: Version | None,
) -> Imports:
    """The imported files, breadth first and each once (LoadConfig in config.go).

    `main` is the path that containerd gets: relative imports are resolved against its directory,
    wherever a link leads. `imports_of` returns the imports of a file.
    """
    pending, missing = [main], []
    for file in pending:
        for pattern in imports_of(file):
            place = absolute(pattern, file, version)
            paths = found(tree, place)
            if not paths and not is_pattern(place):
                missing.append(MissingImport(file, place))
            pending += [path for path in paths if path not in pending]
    return Imports(tuple(pending[1:]), tuple(missing))


def found(tree: HostTree, pattern: str) -> tuple[HostPath, ...]:
    """The files that match an import, in the order of Go's filepath.Glob."""
    if not is_pattern(pattern):
        place = HostPath(pattern)
        return (place,) if tree.exists(place) else ()
    places = [HostPath("")]
    for wanted in posixpath.normpath(pattern).strip("/").split("/"):
        is_plain = not _MAGIC.intersection(wanted)
        places = [
            place / name
            for place in places
            for name in ([wanted] if is_plain else tree.children(place))
            if is_plain or matches(wanted, name)
        ]
    return tuple(place for place in places if tree.exists(place))


def files_in(tree: HostTree, directory: HostPath) -> tuple[HostPath, ...]:
    """The files of a drop-in directory."""
    paths = (directory / name for name in tree.children(directory))
    return tuple(path for path in paths if not _is_directory(tree, path))


def _is_directory(tree: HostTree, path: HostPath) -> bool:
    status = tree.status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


_DUMP_SECONDS = 20.0
_UNKNOWN = "Ignoring unknown key in TOML"
_NAMED = expression(r'\b(?:plugin|key)=("[^"]*"|\S+)')
_SAID = 300

Texts = dict[str, str | None]
"""The planned content of files; others are unchanged."""


class Dump(Value):
    """The settings that a program reads, and the keys that it does not know."""

    data: dict[str, Any]
    unknown: tuple[str, ...] = ()


def dump_containerd(
    tree: HostTree, main: HostPath, texts: Texts, version: Version | None
) -> Dump | None:
    """The settings that containerd reads; None if it cannot be queried.

    Without texts it reads the files in their own places, and resolves imports itself.

    Raises:
        HostError: it cannot read them.

    """
    if not tree.runs_programs:
        return None
    with tempfile.TemporaryDirectory(prefix="vfiomgr-") as directory:
        if texts:
            place = _Shown(tree, texts, directory, version).put(main, is_main=True)
        else:
            place = tree.locate(main) if tree.exists(main) else None
        dump = ("--config", place, "config", "dump") if place else ("config", "default")
        answer = tree.ask(("containerd", *dump), _DUMP_SECONDS)
    return None if answer is None else _read(answer, "containerd")


class _Shown(Value):
    """Planned files in a directory."""

    tree: HostTree
    texts: Texts
    directory: str
    version: Version | None
    places: dict[str, str] = field(default_factory=dict)
    """The temporary path of each file."""

    def put(self, path: str, *, is_main: bool = False) -> str | None:
        """Show a file to the program, with imported files in their own places.

        None without a main file; the program reports a missing import itself.
        """
        import tomlkit  # noqa: PLC0415 - slow to import
        from tomlkit.exceptions import TOMLKitError  # noqa: PLC0415

        if path in self.places:
            return self.places[path]
        own = HostPath(self.tree.followed(HostPath(path)))
        text = self._text(own)
        if text is None:
            gone = os.path.join(self.directory, "gone")
            return None if is_main else gone if own in self.texts else self._own_place(path)
        try:
            document = tomlkit.parse(text)
        except (TOMLKitError, ValueError, RecursionError) as error:
            message = f"cannot read {own}: {error}"
            raise InvalidDocument(message, "correct the file first; nothing was changed") from None
        patterns = imports_of(document.unwrap(), path)
        is_own = not patterns and own not in self.texts
        place = os.path.join(self.directory, f"{len(self.places)}-{HostPath(path).name}")
        self.places[path] = self._own_place(own) if is_own else place  # files may import each other
        if patterns:
            files = (file for pattern in patterns for file in self._found(pattern, path))
            document["imports"] = [self.put(file) for file in files]
        if not is_own:
            with open(place, "w", encoding="utf-8", newline="") as file:
                file.write(document.as_string())
        return self.places[path]

    def _text(self, path: str) -> str | None:
        return self.texts[path] if path in self.texts else self.tree.read_text(HostPath(path))

    def _own_place(self, path: str) -> str:
        return self.tree.locate(HostPath(path))

    def _found(self, pattern: str, importer: str) -> Iterator[str]:
        """The files that match an import, including planned ones; sorted as in Go."""
        pattern = absolute(pattern, importer, self.version)
        if not is_pattern(pattern):
            yield pattern
            return
        to_be = {path for path in self.texts if covers(pattern, path)}
        for path in sorted(
            to_be.union(found(self.tree, pattern)), key=lambda path: path.split("/")
        ):
            if self.texts.get(path, "") is not None:
                yield path


def _said(answer: ProgramAnswer) -> str:
    """The end of what a program printed, in one line."""
    return " ".join((answer.error or answer.output).split())[-_SAID:]


def _read(answer: ProgramAnswer, name: str) -> Dump:
    if answer.status:
        message = f"{name} cannot read its configuration: {_said(answer)}"
        raise HostError(message, "correct it first; nothing was changed")
    try:
        data = parse_toml(answer.output)
    except Malformed as error:
        message = f"cannot read the output of {name}: {error}"
        raise HostError(message, "nothing was changed; please report its version") from None
    lines = (line for line in answer.error.splitlines() if _UNKNOWN in line)
    return Dump(data, tuple(" ".join(_NAMED.findall(line)).replace('"', "") for line in lines))


def dump_crio(
    tree: HostTree, main: HostPath, drop_ins: Iterable[HostPath], texts: Texts
) -> Dump | None:
    """The settings that CRI-O reads; None if it cannot be queried.

    Without texts it reads the files in their own places.

    Raises:
        HostError: it cannot read them.

    """
    if not tree.runs_programs:
        return None
    if not texts:
        return _own_dump_of_crio(tree, main)
    with tempfile.TemporaryDirectory(prefix="vfiomgr-") as directory:
        inner = os.path.join(directory, "crio.conf.d")
        os.mkdir(inner)
        place = os.path.join(directory, "crio.conf")
        _copy(tree, main, texts, place)
        for path in dict.fromkeys((*drop_ins, *texts)):
            if path != main:
                _copy(tree, HostPath(path), texts, os.path.join(inner, HostPath(path).name))
        command = ("crio", "--config", place, "--config-dir", inner, "config")
        answer = tree.ask(command, _DUMP_SECONDS)
    return None if answer is None else _read(answer, "CRI-O")


def _own_dump_of_crio(tree: HostTree, main: HostPath) -> Dump | None:
    """CRI-O works without its main file, but not if a missing one is named."""
    named = ("--config", tree.locate(main)) if tree.exists(main) else ()
    inner = tree.locate(main.parent / "crio.conf.d")
    answer = tree.ask(("crio", *named, "--config-dir", inner, "config"), _DUMP_SECONDS)
    return None if answer is None else _read(answer, "CRI-O")


def _copy(tree: HostTree, path: HostPath, texts: Mapping[str, str | None], place: str) -> None:
    text = texts[path] if path in texts else tree.read_text(path)
    if text is None and not place.endswith("crio.conf"):
        return
    with open(place, "w", encoding="utf-8", newline="") as file:
        file.write(text or "")


def validate_docker(tree: HostTree, text: str) -> bool:
    """Let Docker validate a daemon.json; False if it is not installed, or too old (before 23).

    Raises:
        HostError: it rejects the file.

    """
    if not tree.runs_programs:
        return False
    with tempfile.TemporaryDirectory(prefix="vfiomgr-") as directory:
        place = os.path.join(directory, "daemon.json")
        with open(place, "w", encoding="utf-8", newline="") as file:
            file.write(text)
        answer = tree.ask(("dockerd", "--validate", "--config-file", place), _DUMP_SECONDS)
    if answer is None or "unknown flag" in answer.error:
        return False
    if answer.status:
        message = f"Docker rejects the file: {_said(answer)}"
        raise HostError(message, "nothing was changed; correct what it names, or report it")
    return True
