"""The place of a container runtime's configuration, and its files."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.containers.runtimes import facts as runtimes_facts
from vfiomgr.containers.runtimes import other_runtimes, text
from vfiomgr.containers.runtimes.model import (
    ConfigFile,
    ProgramName,
    RuntimeFacts,
    absolute,
    depends_on_release,
    imports_of,
)
from vfiomgr.containers.runtimes.record import parse_record, text_of_record
from vfiomgr.diagnostic import refuse
from vfiomgr.paths import HostPath
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.containers.runtimes.facts import Texts
    from vfiomgr.host.tree import HostTree

_EXECUTABLE = 0o111
_DROP_IN = "50-vfiomgr"
_V3_TEMPLATE_SINCE = Version(2, 0)
_OF_ROOT, _OF_FILE = Version(1, 7, 15), Version(1, 7, 16)
"""The last release of 1.7 with the old rule for relative imports, and the first with the new
one."""
_NAMES: dict[ProgramName, str] = {"containerd": "containerd", "crio": "CRI-O", "docker": "Docker"}


class RuntimeLocation(Value):
    """The selected runtime, and the place of its configuration."""

    program: ProgramName
    main: HostPath
    version: Version | None
    other: Version | None = None
    """The installed version if another release was given: it is not queried."""
    is_series: bool = False
    """Whether a release series was given, e.g. 1.7."""
    named: HostPath | None = None
    """The path that the runtime gets, if it is a link to `main`."""

    @property
    def has_release(self) -> bool:
        """Whether its rule for relative imports is known."""
        is_split = (
            self.is_series
            and self.version is not None
            and (self.version.major, self.version.minor) in ((1, 6), (1, 7))
        )
        return self.version is not None and not is_split

    @property
    def given(self) -> HostPath:
        """The path that the runtime gets: relative imports are resolved against it."""
        return self.named or self.main

    def __str__(self) -> str:
        """`containerd 2.1.9`; for k3s and rke2 the version of their containerd."""
        name = _NAMES.get(self.program)
        if name is None:
            return self.program
        return f"{name} {self.version}" if self.version is not None else name


def locate(
    tree: HostTree, program: ProgramName, main: str | None = None, version: Version | None = None
) -> RuntimeLocation:
    """The runtime; what is not given is read from the host."""
    path = runtimes_facts.main_file(program) if main is None else HostPath(main)
    place = runtimes_facts.read_config(tree, path).path
    installed = runtimes_facts.read_version(tree, program)
    other = None
    if program == "containerd" and version is not None and installed is not None:
        is_same = (version.major, version.minor) == (installed.major, installed.minor)
        other = None if is_same else installed
        version = installed if is_same and version.micro == 0 else version
    named = None if place == path else path
    is_series = version is not None and version != installed and version.micro == 0
    return RuntimeLocation(program, place, version or installed, other, is_series, named)


def places_of(
    tree: HostTree,
    name: str,
    program: ProgramName | None,
    main: str | None,
    version: Version | None,
) -> tuple[RuntimeLocation, ...]:
    """The places of vfiomgr's entry with a name, in each runtime and file that the options allow.

    Raises:
        NeedsRoot: only root may read the record.
        InvalidDocument: the record is damaged.

    """
    places = []
    for one in parse_record(text_of_record(tree)):
        if not one.has_entry(name) or program not in (None, one.program):
            continue
        usual = locate(tree, one.program, main, version)
        if usual.main == one.main:
            places.append(usual)
        elif main is None:
            places.append(locate(tree, one.program, one.main, version))
    return tuple(places)


def recorded_places(tree: HostTree) -> tuple[RuntimeLocation, ...]:
    """All places with entries of vfiomgr.

    Raises:
        NeedsRoot, InvalidDocument: as `places_of`.

    """
    record = parse_record(text_of_record(tree))
    names = dict.fromkeys(entry.name for runtime in record for entry in runtime.entries)
    found = (place for name in names for place in places_of(tree, name, None, None, None))
    return tuple({(place.program, place.main): place for place in found}.values())


def read_facts(
    tree: HostTree, place: RuntimeLocation, texts: Texts, *, was_ours: bool
) -> RuntimeFacts:
    """The files of a runtime, with planned texts."""
    main = _with(runtimes_facts.read_config(tree, place.main), texts)
    own = runtimes_facts.read_config(tree, drop_in(tree, place))
    facts = RuntimeFacts(
        place.version,
        main,
        _with(own, texts),
        beside=beside(tree, place),
        is_dockers=place.program == "containerd" and "docker" in runtimes_facts.present(tree),
        was_ours=was_ours,
    )
    if place.program == "containerd" and main.text is not None:
        return _with_imports(tree, place, facts, texts)
    if place.program == "crio":
        others = (path for path in facts.beside if not path.endswith("~"))
        return replace(facts, imported=_readable(tree, others, texts))
    return facts


def _with_imports(
    tree: HostTree, place: RuntimeLocation, facts: RuntimeFacts, texts: Texts
) -> RuntimeFacts:
    """The facts with containerd's imports."""

    def imports(path: HostPath) -> tuple[str, ...]:
        file = _with(runtimes_facts.read_config(tree, path), texts)
        return imports_of(text.parse(file.text or "", file.path), file.path)

    def found(version: Version | None) -> runtimes_facts.Imports:
        return runtimes_facts.imported(tree, place.given, imports, version)

    read = found(place.version)
    own = imports(place.given)
    return replace(
        facts,
        imported=_readable(tree, read.paths, texts),
        imports=tuple(absolute(pattern, place.given, place.version) for pattern in own),
        missing=read.missing,
        unsure=tuple(
            pattern
            for pattern in own
            if depends_on_release(pattern)
            and not place.has_release
            and found(_OF_ROOT).paths != found(_OF_FILE).paths
        ),
    )


def _readable(tree: HostTree, paths: Iterable[HostPath], texts: Texts) -> tuple[ConfigFile, ...]:
    files = (_with(runtimes_facts.read_config(tree, path), texts) for path in paths)
    return tuple(file for file in files if file.text is not None)


def _with(file: ConfigFile, texts: Texts) -> ConfigFile:
    return replace(file, text=texts[file.path]) if file.path in texts else file


def drop_in(tree: HostTree, place: RuntimeLocation) -> HostPath:
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


def _template(tree: HostTree, place: RuntimeLocation) -> HostPath:
    """The template that k3s or rke2 uses, or would use."""
    directory = place.main.parent
    names = {3: directory / other_runtimes.V3_NAME, 2: directory / "config.toml.tmpl"}
    for path in names.values():
        if tree.exists(path):
            return path
    made = runtimes_facts.read_config(tree, place.main)
    if made.text is not None:
        return names[3 if text.parse(made.text, made.path).get("version") == 3 else 2]  # noqa: PLR2004
    if place.version is None:
        message = f"cannot choose a template: {place.program} has not created {made.path} yet"
        hint = f"start {place.program} once, or pass --containerd-version (k3s --version shows it)"
        refuse("runtime-release-unknown", place.program, message, hint)
    return names[3 if place.version >= _V3_TEMPLATE_SINCE else 2]


def beside(tree: HostTree, place: RuntimeLocation) -> tuple[HostPath, ...]:
    """Files of other programs in the drop-in directories."""
    if place.program not in ("containerd", "crio"):
        return ()
    own = drop_in(tree, place)
    return tuple(path for path in runtimes_facts.files_in(tree, own.parent) if path != own)


def require_program(tree: HostTree, path: HostPath, remedy: str) -> None:
    """Make sure that a path is a program."""
    require_file(tree, path, remedy)
    found = tree.resolve(path)
    status = None if found is None else tree.status(found)
    if status is not None and not status.st_mode & _EXECUTABLE:
        message = f"{path} is not executable"
        refuse(
            "runtime-program-missing",
            path,
            message,
            f"make it executable: chmod +x {tree.locate(path)}; or {remedy}",
        )


def require_file(tree: HostTree, path: HostPath, remedy: str) -> None:
    """Make sure that a path is a regular file, or a link to one."""
    found = tree.resolve(path)
    status = None if found is None else tree.status(found)
    if status is None:
        message = f"{path} does not exist"
        refuse("runtime-program-missing", path, message, remedy)
    if not stat.S_ISREG(status.st_mode):
        kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
        message = f"{path} is {kind}"
        refuse("runtime-program-missing", path, message, remedy)
