"""The installed Kata: version, shims, configurations; and the release to assume."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.kata.model import (
    KATA_DIRECTORIES,
    NEWEST,
    KataConfigurationFile,
    KataInstallation,
    KataRelease,
    Shim,
    search_path,
)
from vfiomgr.paths import HostPath
from vfiomgr.units import Version

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.kata.model import RuntimeName
    from vfiomgr.snapshot.source import HostSource

VERSION_FILES = (HostPath("/opt/kata/VERSION"),)
SHIMS: tuple[tuple[RuntimeName, HostPath], ...] = (
    ("rs", HostPath("/opt/kata/runtime-rs/bin/containerd-shim-kata-v2")),
    ("go", HostPath("/opt/kata/bin/containerd-shim-kata-v2")),
    ("go", HostPath("/usr/bin/containerd-shim-kata-v2")),
    ("go", HostPath("/usr/local/bin/containerd-shim-kata-v2")),
)
_RUNTIMES = (HostPath("/opt/kata/bin/kata-runtime"), HostPath("/usr/bin/kata-runtime"))
_SECONDS = 5.0
_MOST = 1 << 20
"""The size limit of a configuration; the longest that Kata ships has 40 KiB."""
_TOLD = expression(r"(?:version|kata-runtime)\s*:\s*v?(\d+\.\d+(?:\.\d+)?)", re.IGNORECASE)
_MOST_LINKS = 40
"""The link limit of the kernel (MAXSYMLINKS)."""


def read_installation(tree: HostTree) -> KataInstallation:
    """The installed Kata; programs are queried only on the machine itself."""
    there = (path for _, path in SHIMS if tree.exists(path))
    shims = tuple(Shim(name, path) for path in there if (name := runtime_at(tree, path)))
    version, source = _read_version(tree, shims)
    return KataInstallation(version, source, shims, tuple(read_configurations(tree)))


def installation_of(host: HostSource) -> KataInstallation:
    """What the host's tree shows of Kata; a snapshot shows nothing."""
    if host.snapshot is not None:
        return KataInstallation()
    return read_installation(host.tree)


def kata_release(
    host: HostSource,
    installation: KataInstallation,
    version: str | None,
    runtime: RuntimeName | None,
) -> KataRelease:
    """The given release, the installed one, or the newest known one, with a note.

    Raises:
        UsageError: the given version is invalid.

    """
    told = installation.version if version is None else Version.parse(version)
    found = told or NEWEST
    release = KataRelease(found, runtime or installation.default_runtime(found))
    if told is None:
        host.on_note(f"{_why_unknown(installation)}; assuming {release} (set --kata-version)")
    return release


def _why_unknown(installation: KataInstallation) -> str:
    """Why the release of Kata is unknown."""
    if installation.version_source:
        return f"{installation.version_source} is not a valid version"
    if installation.shims:
        return f"{installation.shims[0].path} found, but its version is unknown"
    return "Kata not found"


def runtime_at(tree: HostTree, path: HostPath) -> RuntimeName | None:
    """The runtime of the shim at a path, by the target of its links; None if unknown."""
    known = {place: name for name, place in SHIMS}
    place = tree.resolve(path)
    return (known.get(place) if place is not None else None) or known.get(path)


def read_configuration(tree: HostTree, path: HostPath) -> KataConfigurationFile | None:
    """A configuration with the files of its config.d; None if it is not readable."""
    resolved = tree.resolve(path)
    text = tree.read_text(resolved, _MOST) if resolved is not None else None
    if resolved is None or text is None:
        return None
    directory = resolved.parent / "config.d"
    found = ((directory / name, _read(tree, directory / name)) for name in tree.children(directory))
    names = (name for name in tree.children(resolved.parent) if name.endswith(".toml"))
    beside = (resolved.parent / name for name in names if name != resolved.name)
    return KataConfigurationFile(
        path=path,
        resolved=resolved,
        text=text,
        drop_ins=tuple((name, content) for name, content in found if content is not None),
        neighbours=tuple(other for other in beside if tree.resolve(other) != resolved),
    )


def read_configurations(tree: HostTree) -> Iterator[KataConfigurationFile]:
    """The default configurations first, then the others of the same directories."""
    names = [*search_path("rs"), *search_path("go")]
    for directory in KATA_DIRECTORIES:
        listed = (name for name in tree.children(directory) if name.endswith(".toml"))
        names += [directory / name for name in listed]
    for path in dict.fromkeys(names):
        found = read_configuration(tree, path)
        if found is not None:
            yield found


def _read_version(tree: HostTree, shims: tuple[Shim, ...]) -> tuple[Version | None, str]:
    for path in VERSION_FILES:
        version = _parsed(tree.read(path))
        if version is not None:
            return version, path
    damaged = next((path for path in VERSION_FILES if tree.exists(path)), "")
    if not tree.runs_programs:
        return None, damaged
    for program in (*_RUNTIMES, *(shim.path for shim in shims)):
        if not tree.exists(program):
            continue
        told = _TOLD.search(tree.run((program, "--version"), _SECONDS) or "")
        if told is not None:
            return _parsed(told[1]), f"{program} --version"
    return None, damaged


def _parsed(text: str | None) -> Version | None:
    try:
        return None if text is None else Version.parse(text)
    except UsageError:
        return None


def _read(tree: HostTree, path: HostPath) -> str | None:
    place = tree.resolve(path)
    return None if place is None else tree.read_text(place, _MOST)
