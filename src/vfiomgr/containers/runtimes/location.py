"""The installed container runtimes, the places of their configurations, and the files there."""

from __future__ import annotations

import posixpath
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace

from vfiomgr.containers.runtimes import other_runtimes, text, values
from vfiomgr.containers.runtimes.containerd import CRI_NAMES, CRI_V2, CRI_V3
from vfiomgr.containers.runtimes.model import (
    ConfigFile,
    MissingImport,
    ProgramName,
    RuntimeFacts,
    absolute,
    depends_on_release,
    imports_of,
    is_pattern,
    matches,
)
from vfiomgr.containers.runtimes.record import parse_record, text_of_record
from vfiomgr.diagnostic import refuse
from vfiomgr.documents.text import Malformed, parse_toml
from vfiomgr.errors import InvalidDocument, UsageError
from vfiomgr.paths import HostPath
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.containers.runtimes.model import Key, Texts
    from vfiomgr.host.tree import HostTree

_MOST_OF_TOOLKIT = 1 << 20
_UNITS = ("/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")
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
_NODES: tuple[ProgramName, ...] = ("k3s", "rke2")
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
    return tuple(
        name
        for name, program in _PROGRAMS.items()
        if _has_program(tree, program)
        or tree.exists(_MAIN[name])
        or (name in ("crio", *_NODES) and tree.exists(_MAIN[name].parent))
    )


_K0S_UNITS = ("k0sworker", "k0scontroller")
_K0S_MAIN = HostPath("/etc/k0s/containerd.toml")
_K0S_DROP_INS = HostPath("/etc/k0s/containerd.d")
_K0S = ("/usr/local/bin/k0s", "/usr/bin/k0s", _K0S_MAIN, _K0S_DROP_INS)
_MICROK8S_ARGS = HostPath("/var/snap/microk8s/current/args")
MICROK8S_MAIN = _MICROK8S_ARGS / "containerd.toml"
"""What MicroK8s renders at each start from its template."""
MICROK8S_TEMPLATE = _MICROK8S_ARGS / "containerd-template.toml"
_MICROK8S = ("/snap/bin/microk8s", _MICROK8S_ARGS)
_DOCKER_SNAP = ("/snap/bin/docker", "/var/snap/docker/current")
_DOCKER_SNAP_FILE = "/var/snap/docker/current/config/daemon.json"
_STATED_VERSION = re.compile(r"^\s*version\s*=\s*(\d+)", re.MULTILINE)
_UNREAD = (
    (
        re.compile(r"^\s*imports\s*=", re.MULTILINE),
        "an import, whose CRI settings k0s does not merge",
    ),
    (
        re.compile(r"^\s*\[plugins\.[\"']io\.containerd\.runtime\.v1\.linux", re.MULTILINE),
        "io.containerd.runtime.v1.linux, whose settings CRI does not use",
    ),
)
"""What in a drop-in of k0s adds no handler."""


def refuse_elsewhere(tree: HostTree, program: ProgramName | None, main: str | None) -> None:
    """Refuse if the selected runtime reads its entries from files that vfiomgr does not write.

    k0s writes /etc/k0s/containerd.toml at each start while it has the marker, and merges the CRI
    settings of containerd.d (pkg/component/worker/containerd/component.go). MicroK8s renders its
    template at each start (run-containerd-with-args). Docker as a snap reads its own daemon.json.

    Raises:
        Refusal: it does; the remedy has the file and the command.
    """
    is_selected = (program is None and main is None) or (
        program == "containerd" and main is None and not _has_program(tree, "containerd")
    )
    others = [name for name in present(tree) if name != "docker"]
    if (main == _K0S_MAIN or (is_selected and _any(tree, _K0S))) and _is_managed_by_k0s(tree):
        _refuse_k0s(tree, others)
    if is_selected and _any(tree, _K0S):
        message = f"{_K0S_MAIN} has no line k0s_managed=true: k0s reads it as it is"
        hint = f"select it: --runtime containerd --runtime-config {_K0S_MAIN}"
        refuse("runtime-elsewhere", "k0s", message, f"{hint}{_or_select(others)}")
    if main == MICROK8S_MAIN or (is_selected and _any(tree, _MICROK8S)):
        _refuse_microk8s(tree, others)
    is_docker = main is None and (program == "docker" or (program is None and not others))
    if is_docker and _any(tree, _DOCKER_SNAP) and not _has_program(tree, "dockerd"):
        message = f"Docker is a snap here: it reads {_DOCKER_SNAP_FILE}, not {_MAIN['docker']}"
        refuse(
            "runtime-elsewhere",
            "Docker",
            message,
            "install Docker from a package (docker-ce or docker.io), because the snap is confined "
            f"and may not run programs of the host; or add the entry to {_DOCKER_SNAP_FILE}, then: "
            "snap restart docker",
        )


def _refuse_k0s(tree: HostTree, others: Sequence[ProgramName]) -> NoReturn:
    unread = [
        f"; {path} has {why}"
        for path in files_in(tree, _K0S_DROP_INS)
        for pattern, why in _UNREAD
        if pattern.search(tree.read_text(path) or "")
    ]
    units = (u for u in _K0S_UNITS for d in _UNITS if tree.exists(HostPath(f"{d}/{u}.service")))
    refuse(
        "runtime-elsewhere",
        "k0s",
        f"k0s (since 1.27.1) reads handlers from {_K0S_DROP_INS}, where vfiomgr does not write"
        f"{''.join(unread)}",
        f"write {_handler_table(tree, _K0S_MAIN)} to {_K0S_DROP_INS}/NAME.toml, "
        f"then: systemctl restart {next(units, _K0S_UNITS[0])}{_or_select(others)}",
    )


def _refuse_microk8s(tree: HostTree, others: Sequence[ProgramName]) -> NoReturn:
    refuse(
        "runtime-elsewhere",
        "MicroK8s",
        f"MicroK8s writes its containerd configuration at each start, from {MICROK8S_TEMPLATE}, "
        "which vfiomgr does not write",
        f"add {_handler_table(tree, MICROK8S_TEMPLATE)} to {MICROK8S_TEMPLATE}, "
        f"then: snap restart microk8s.daemon-containerd{_or_select(others)}",
    )


def _handler_table(tree: HostTree, path: HostPath) -> str:
    """The table of a handler in the version that a file states, or in both."""
    stated = _STATED_VERSION.search(tree.read_text(path) or "")
    tables = {2: f'[plugins."{CRI_V2}".containerd.runtimes.NAME]'}
    tables[3] = f"[plugins.'{CRI_V3}'.containerd.runtimes.NAME]"
    if stated is None or int(stated[1]) not in (2, 3, 4):
        return f"{tables[2]} (version 3: {tables[3]})"
    return tables[min(int(stated[1]), 3)]


def _or_select(others: Sequence[ProgramName]) -> str:
    return f"; or select another runtime: --runtime {others[0]}" if others else ""


def _is_managed_by_k0s(tree: HostTree) -> bool:
    """Whether k0s writes its main file: if it does not exist, or has the marker."""
    told = tree.read_text(_K0S_MAIN)
    return told is None or "# k0s_managed=true" in map(str.strip, told.splitlines())


def _has_program(tree: HostTree, name: str) -> bool:
    return any(tree.exists(HostPath(f"{place}/{name}")) for place in _BIN)


def _any(tree: HostTree, places: Iterable[str]) -> bool:
    return any(tree.exists(HostPath(place)) for place in places)


def rootless_files(tree: HostTree) -> tuple[HostPath, ...]:
    """The files that a rootless Docker of a user reads instead of /etc/docker/daemon.json."""
    homes = [HostPath("/home") / name / ".config" for name in tree.children(HostPath("/home"))]
    signs = ("docker/daemon.json", "systemd/user/docker.service")
    return tuple(
        home / "docker/daemon.json"
        for home in homes
        if any(tree.exists(home / sign) for sign in signs)
    )


def read_version(tree: HostTree, name: ProgramName) -> Version | None:
    """The version that a runtime prints, or that of its package in the tree; None if unknown.

    For k3s and rke2 it is the version of their containerd.
    """
    if not tree.runs_programs:
        return packaged(tree, _PACKAGES.get(name, ()))
    version = _told_version(tree, name)
    if version is None or name not in _NODES:
        return version
    is_new = version >= Version(1, 33) or any(
        start <= version < Version(1, start.minor + 1) for start in _WITH_CONTAINERD_2
    )
    return Version(2, 0) if is_new else Version(1, 7)


def version_of(tree: HostTree, program: str, packages: Iterable[str]) -> Version | None:
    """The version that a program prints with --version, or that of its package in the tree."""
    if not tree.runs_programs:
        return packaged(tree, packages)
    told = tree.run((program, "--version"), _SECONDS)
    return None if told is None else _version_in(told)


def _told_version(tree: HostTree, name: ProgramName) -> Version | None:
    """The version that the program itself prints; for k3s and rke2 that of Kubernetes."""
    return version_of(tree, _PROGRAMS[name], ()) if tree.runs_programs else None


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
            paths = matching_files(tree, place)
            if not paths and not is_pattern(place):
                missing.append(MissingImport(file, place))
            pending += [path for path in paths if path not in pending]
    return Imports(tuple(pending[1:]), tuple(missing))


def matching_files(tree: HostTree, pattern: str) -> tuple[HostPath, ...]:
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
    paths = [directory / name for name in tree.children(directory)]
    found = [(path, tree.status(path)) for path in paths]
    return tuple(path for path, status in found if not (status and stat.S_ISDIR(status.st_mode)))


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
    path = main_file(program) if main is None else HostPath(main)
    place = read_config(tree, path).path
    installed = read_version(tree, program)
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
    main = _with(read_config(tree, place.main), texts)
    own = read_config(tree, drop_in(tree, place))
    facts = RuntimeFacts(
        place.version,
        main,
        _with(own, texts),
        beside=beside(tree, place),
        is_dockers=place.program == "containerd" and "docker" in present(tree),
        distribution=_told_version(tree, place.program) if place.program in _NODES else None,
        rootless=rootless_files(tree) if place.program == "docker" else (),
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
        file = _with(read_config(tree, path), texts)
        return imports_of(text.parse(file.text or "", file.path), file.path)

    def read_as(version: Version | None) -> Imports:
        return imported(tree, place.given, imports, version)

    read = read_as(place.version)
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
            and read_as(_OF_ROOT).paths != read_as(_OF_FILE).paths
        ),
    )


def _readable(tree: HostTree, paths: Iterable[HostPath], texts: Texts) -> tuple[ConfigFile, ...]:
    files = (_with(read_config(tree, path), texts) for path in paths)
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
    made = read_config(tree, place.main)
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
    return tuple(path for path in files_in(tree, own.parent) if path != own)


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
            f"make it executable: chmod +x {shlex.quote(tree.locate(path))}; or {remedy}",
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


TOOLKIT = HostPath("/etc/nvidia-container-runtime/config.toml")


def read_toolkit(tree: HostTree, *places: HostPath) -> tuple[str, dict[str, Any]] | None:
    """The first of these configurations of NVIDIA's toolkit, with its file; None if malformed."""
    texts = ((place, tree.read_text(place, _MOST_OF_TOOLKIT)) for place in places)
    path, found = next((pair for pair in texts if pair[1] is not None), ("", None))
    try:
        return path, parse_toml(found or "")
    except Malformed:
        return None
