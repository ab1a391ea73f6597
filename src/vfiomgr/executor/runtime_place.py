"""Where a container runtime reads its configuration, and what is there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vfiomgr.adapters.runtimes import template, text
from vfiomgr.errors import Refusal
from vfiomgr.host import runtimes
from vfiomgr.model.path import HostPath
from vfiomgr.model.runtime import ConfigFile, ProgramName, RuntimeFacts, imports_of
from vfiomgr.model.version import Version

if TYPE_CHECKING:
    from vfiomgr.host.runtime_dump import Texts
    from vfiomgr.host.tree import HostTree

_DROP_IN = "50-vfiomgr"
_V3_TEMPLATE_SINCE = Version(2, 0)
_NAMES: dict[ProgramName, str] = {
    "containerd": "containerd",
    "crio": "CRI-O",
    "docker": "Docker",
}


@dataclass(frozen=True, slots=True)
class Place:
    """The runtime that is meant, and where it reads its configuration."""

    program: ProgramName
    main: HostPath
    version: Version | None
    other: Version | None = None
    """What is installed instead, where another release was told: it is not asked."""

    def __str__(self) -> str:
        """`containerd 2.1.9`; of k3s and rke2 the version is that of the containerd in them."""
        name = _NAMES.get(self.program)
        if name is None:
            return self.program
        return f"{name} {self.version}" if self.version is not None else name


def locate(
    tree: HostTree, program: ProgramName, main: str | None, version: Version | None
) -> Place:
    """The runtime, with what is not told read from the host."""
    path = runtimes.main_file(program) if main is None else HostPath(main)
    place = runtimes.read_config(tree, path).path
    installed = runtimes.read_version(tree, program)
    other = None
    if program == "containerd" and version is not None and installed is not None:
        is_same = (version.major, version.minor) == (installed.major, installed.minor)
        other = None if is_same else installed
    return Place(program, place, version or installed, other)


def read_facts(tree: HostTree, place: Place, texts: Texts, *, was_ours: bool) -> RuntimeFacts:
    """The files of a runtime, with texts that they are to have."""
    main = _with(runtimes.read_config(tree, place.main), texts)
    own = runtimes.read_config(tree, drop_in(tree, place))
    imported: tuple[ConfigFile, ...] = ()
    if place.program == "containerd" and main.text is not None:
        patterns = imports_of(text.parse(main.text, main.path), main.path)
        imported = runtimes.read_imported(tree, main.path, patterns, place.version)
    elif place.program == "crio":
        others = (path for path in beside(tree, place) if not path.endswith("~"))
        imported = tuple(runtimes.read_config(tree, path) for path in others)
    imported = tuple(_with(file, texts) for file in imported)
    return RuntimeFacts(
        place.version,
        main,
        _with(own, texts),
        tuple(file for file in imported if file.text is not None),
        beside(tree, place),
        is_dockers=place.program == "containerd" and "docker" in runtimes.present(tree),
        was_ours=was_ours,
    )


def _with(file: ConfigFile, texts: Texts) -> ConfigFile:
    return replace(file, text=texts[file.path]) if file.path in texts else file


def drop_in(tree: HostTree, place: Place) -> HostPath:
    """The file that vfiomgr writes, beside the main one or instead of it."""
    directory = place.main.parent
    match place.program:
        case "containerd":
            return directory / f"conf.d/{_DROP_IN}.toml"
        case "crio":
            return directory / f"crio.conf.d/{_DROP_IN}.conf"
        case "docker":
            return place.main
        case _:
            return _template(tree, place)


def _template(tree: HostTree, place: Place) -> HostPath:
    """The template that k3s or rke2 takes, or would take.

    Raises:
        Refusal: which one cannot be told.

    """
    directory = place.main.parent
    names = {3: directory / template.V3_NAME, 2: directory / "config.toml.tmpl"}
    for path in names.values():
        if tree.exists(path):
            return path
    made = runtimes.read_config(tree, place.main)
    if made.text is not None:
        return names[3 if text.parse(made.text, made.path).get("version") == 3 else 2]  # noqa: PLR2004
    if place.version is None:
        message = f"{place.program} has made no {made.path} yet, so its template is not known"
        hint = f"start {place.program} once, or pass --containerd-version (k3s --version tells)"
        raise Refusal(message, hint)
    return names[3 if place.version >= _V3_TEMPLATE_SINCE else 2]


def beside(tree: HostTree, place: Place) -> tuple[HostPath, ...]:
    """Files of others where drop-ins are."""
    if place.program not in ("containerd", "crio"):
        return ()
    own = drop_in(tree, place)
    return tuple(path for path in runtimes.files_in(tree, own.parent) if path != own)
