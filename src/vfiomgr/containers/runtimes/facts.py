"""Whether a file gives a runtime an entry with a name, whoever wrote it."""

from __future__ import annotations

import posixpath
import re
import stat
from typing import TYPE_CHECKING

from vfiomgr.containers.runtimes import other_runtimes, text, values
from vfiomgr.containers.runtimes.containerd import CRI_NAMES
from vfiomgr.containers.runtimes.model import (
    ConfigFile,
    MissingImport,
    absolute,
    is_pattern,
    matches,
)
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.paths import HostPath
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vfiomgr.containers.runtimes.model import Key, ProgramName
    from vfiomgr.host.tree import HostTree


_KEYS: dict[ProgramName, tuple[Key, ...]] = {
    "containerd": tuple(("plugins", cri, "containerd", "runtimes") for cri in CRI_NAMES),
    "crio": (("crio", "runtime", "runtimes"),),
    "docker": (("runtimes",),),
}


def has_entry(file: ConfigFile, program: ProgramName, name: str) -> bool:
    """Whether the entry exists.

    Raises:
        InvalidDocument: the file is not readable.

    """
    if file.text is None:
        return False
    if program not in _KEYS:
        return other_runtimes.names(file.text, name)
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
