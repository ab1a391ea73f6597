"""Handlers of container runtimes, to which RuntimeClasses refer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from vfiomgr.documents.text import Malformed, line_of, parse_toml
from vfiomgr.units import Version
from vfiomgr.value import Value

CriName = Literal["containerd", "crio"]


class HandlerEntry(Value):
    """The entry of a handler in a container runtime."""

    name: str
    source: str
    """The file that defines it last."""
    runtime_type: str = ""
    """`io.containerd.kata-vfio.v2`; `vm` for CRI-O."""
    runtime_path: str = ""
    """The path of the shim; empty if it is found by the name of the type."""
    config_path: str = ""
    """The path of Kata's configuration; empty if the shim finds it."""
    privileged_without_host_devices: bool = False
    pod_annotations: tuple[str, ...] = ()
    """Patterns of pod annotations that the shim gets; CRI-O: allowed_annotations."""
    plugins: tuple[str, ...] = ()
    """The plugins of containerd whose tables have it."""
    systemd_cgroup: bool | None = None
    """SystemdCgroup of containerd's options; None if it is not set, which is false."""
    binary: str = ""
    """BinaryName of containerd's options: the OCI runtime; empty for runc."""
    monitor_path: str = ""
    """The path of conmon for CRI-O, its own or that of all handlers; empty if $PATH finds it."""

    def tells(self, annotation: str) -> bool:
        """Whether the shim gets an annotation (a `*` at the end of a pattern matches the rest)."""
        return any(
            annotation.startswith(pattern.removesuffix("*"))
            if pattern.endswith("*")
            else annotation == pattern
            for pattern in self.pod_annotations
        )

    @property
    def is_kata(self) -> bool:
        """Whether it runs a Kata VM."""
        is_named = "kata" in self.runtime_type or "kata" in self.runtime_path
        return is_named or self.runtime_type == "vm"

    @property
    def shim(self) -> str:
        """The program's name without a path: containerd-shim-NAME-VERSION; or empty."""
        if not self.runtime_type:
            return ""
        *_, name, version = ("", "", *self.runtime_type.split("."))
        return f"containerd-shim-{name}-{version}"


class UnreadFile(Value):
    """An unreadable file of a container runtime's configuration."""

    place: str
    """`FILE:LINE` for an error in a line."""
    why: str
    is_wrong: bool = True
    """Whether the runtime cannot read it either; otherwise only we may not."""
    is_unsure: bool = False
    """Whether only some releases read it: a drop-in without an import."""

    def __str__(self) -> str:
        """`/etc/containerd/config.toml:3: …`."""
        return f"{self.place}: {self.why}"


MixtureEffect = Literal["stops", "hides", "ignored", "unknown"]
"""`hides` previous CRI settings; `unknown` if it depends or is untested."""


class MixedVersions(Value):
    """A file of containerd's configuration with another version than the main one."""

    file: str
    what: str
    remedy: str
    effect: MixtureEffect = "unknown"

    def __str__(self) -> str:
        """Both sentences."""
        return f"{self.what}. {self.remedy[:1].upper()}{self.remedy[1:]}"


class HandlerFacts(Value):
    """The configuration of a container runtime, as far as handlers are concerned."""

    cri: CriName
    files: tuple[str, ...]
    """The files that were read, in order."""
    handlers: tuple[HandlerEntry, ...]
    unreadable: tuple[UnreadFile, ...] = ()
    """Files that are not TOML, or that this user may not read."""
    unsure: tuple[str, ...] = ()
    """Drop-ins without an import, which only containerd 2.3 reads."""
    schemas: tuple[tuple[str, int], ...] = ()
    """containerd's `version` of each file that states one."""
    version: Version | None = None
    """The version of containerd, if known."""
    with_cri: tuple[str, ...] = ()
    """The files with settings for containerd's CRI plugin."""
    mixed: tuple[MixedVersions, ...] = ()
    """Imports of another version than the main file."""
    disabling: tuple[str, ...] = ()
    """The files that disable containerd's CRI plugin (disabled_plugins)."""
    default: str = ""
    """The handler of pods without a RuntimeClass; empty if no file states it."""
    unread: tuple[HandlerEntry, ...] = ()
    """Those of files in usual directories that no release reads without an import."""
    lacks_conmon: bool = False
    """Whether no usual directory has the conmon that CRI-O needs."""
    hook_directories: tuple[str, ...] = ()
    """Where CRI-O looks for OCI hooks (hooks_dir)."""
    nvidia_hooks: tuple[str, ...] = ()
    """NVIDIA's OCI hooks in these and other usual directories."""
    without_program: frozenset[str] = frozenset()
    """The handlers of CRI-O whose program was not found: it ignores them, except the default."""

    @property
    def is_known(self) -> bool:
        """Whether there is a configuration, and every file that all releases read was read."""
        is_whole = all(file.is_unsure for file in self.unreadable)
        return bool(self.files or self.unsure) and is_whole

    def has_built_in(self, name: str) -> bool:
        """Whether the program has a handler without any entry; an empty name is its default.

        containerd 1.x forgets it once a file has a table of handlers (go-toml makes maps anew).
        """
        return not name or name in _BUILT_IN[self.cri]

    def passes_over(self, entry: HandlerEntry) -> bool:
        """Whether containerd reads no table with a handler, in this version of the configuration.

        Before 2.3 the version that is stated last applies to all files.
        """
        stated = dict(self.schemas)
        last = next(reversed(stated.values()), 1)
        is_own = self.version is None or self.version >= _READ[0][0]
        schema = stated.get(entry.source, 1) if is_own else last
        release = self.version or _USUAL.get(schema, _READ[0][0])
        read = next(names for since, names in _READ if release >= since).get(schema)
        is_unsure = entry.source in self.unsure or bool(self.mixed)
        return not is_unsure and read is not None and not set(read) & set(entry.plugins)

    def schema(self, source: str) -> int | None:
        """The version of the configuration format that a file states."""
        return dict(self.schemas).get(source)

    def handler(self, name: str) -> HandlerEntry | None:
        """The entry of a handler."""
        return next((entry for entry in self.handlers if entry.name == name), None)


V3_PLUGIN, V2_PLUGIN, _V1_PLUGIN = (
    "io.containerd.cri.v1.runtime",
    "io.containerd.grpc.v1.cri",
    "cri",
)
_PLUGINS = (V3_PLUGIN, V2_PLUGIN, _V1_PLUGIN)
_CONTAINERD = tuple(("plugins", plugin, "containerd", "runtimes") for plugin in _PLUGINS)
"""The keys in versions 3, 2 and 1 of its configuration."""
_READ: tuple[tuple[Version, Mapping[int, tuple[str, ...]]], ...] = (
    (Version(2, 3), {1: _PLUGINS, 2: _PLUGINS[:2], 3: _PLUGINS[:2], 4: (V3_PLUGIN,)}),
    (Version(2, 0), {1: (V3_PLUGIN,), 2: _PLUGINS[:2], 3: (V3_PLUGIN,)}),
    (Version(0, 0), {1: (_V1_PLUGIN,), 2: (V2_PLUGIN,), 3: (V2_PLUGIN,)}),
)
"""From each release on, the plugins that are read in each version of the configuration.

Before 2.0 names are looked up as they are (Decode in config.go: short ones in version 1). 2.0 to
2.2 take a file of version 1 for one of version 3 before they move the table of CRI, so it is lost
(containerd/runwasi#1002); 2.3 moves it in every version below its own (MigrateConfigTo).
"""
_USUAL = {1: Version(1, 7), 2: Version(1, 7), 3: Version(2, 0), 4: Version(2, 3)}
"""The release to assume for a version of the configuration."""
_SINCE = {3: Version(2, 0), 4: Version(2, 3)}
HOOKS = tuple(f"{place}/containers/oci/hooks.d" for place in ("/usr/share", "/etc", "/run"))
"""Directories for OCI hooks; CRI-O reads the first by default (hooks.DefaultDir), Podman all."""
_CRIO = ("crio", "runtime", "runtimes")
_BUILT_IN: Mapping[CriName, tuple[str, ...]] = {"containerd": ("runc",), "crio": ("runc", "crun")}
_MARK = "\ufeff"
"""A byte order mark, which containerd 1.x and CRI-O ignore."""


def first_reader(schema: int) -> Version:
    """The first containerd that reads a version of the configuration; later versions count as 4."""
    return _SINCE.get(min(schema, max(_SINCE)), Version(0, 0))


def read_containerd(
    files: Iterable[tuple[str, str]], unsure: Iterable[tuple[str, str]] = ()
) -> HandlerFacts:
    """The definitions of the main file and its imports, in order.

    `unsure` are files that not every release reads: they are used if nothing else has the handler.
    """
    read, unreadable = _parsed(files)
    merged: dict[str, dict[str, Any]] = {}
    for source, document in read:
        for place in _CONTAINERD:
            _take(merged, _table(document, place), source, place[1])
    later, unreadable_later = _parsed(unsure, is_unsure=True)
    for source, document in later:
        extra: dict[str, dict[str, Any]] = {}
        for place in _CONTAINERD:
            _take(extra, _table(document, place), source, place[1])
        for name, entry in extra.items():
            merged.setdefault(name, entry)
    return HandlerFacts(
        cri="containerd",
        files=tuple(source for source, _ in read),
        handlers=tuple(
            _entry(name, entry, _table(entry, ("options",)), "ConfigPath", "pod_annotations")
            for name, entry in merged.items()
        ),
        unreadable=(*unreadable, *unreadable_later),
        unsure=tuple(source for source, _ in later),
        schemas=tuple(
            (source, document["version"])
            for source, document in read
            if type(document.get("version")) is int
        ),
        with_cri=tuple(
            source
            for source, document in read
            if any(_table(document, place[:2]) for place in _CONTAINERD)
        ),
        disabling=tuple(source for source, document in read if _disables_cri(document)),
        default=_last(
            _text(_table(document, place[:-1]), "default_runtime_name")
            for _, document in read
            for place in _CONTAINERD
        ),
    )


_INHERITED = ("runtime_path", "runtime_type", "runtime_config_path")
"""What inherit_default_runtime takes from the default (ValidateRuntimes in pkg/config)."""


def read_crio(files: Iterable[tuple[str, str]]) -> HandlerFacts:
    """The definitions of crio.conf and the files of crio.conf.d, in order; the last one wins."""
    read, unreadable = _parsed(files)
    merged: dict[str, dict[str, Any]] = {}
    conmon = _last(_text(_table(doc, _CRIO[:-1]), "conmon") for _, doc in read)
    for source, document in read:
        for name, entry in _table(document, _CRIO).items():
            if isinstance(entry, dict):
                own = {"monitor_path": conmon} if conmon else {}
                merged[name] = {**entry, **own, "": (source, ())}
    default = _last(_text(_table(doc, _CRIO[:-1]), "default_runtime") for _, doc in read)
    hooks = [_table(doc, _CRIO[:-1]).get("hooks_dir") for _, doc in read]
    inherited = {key: merged.get(default, {}).get(key, "") for key in _INHERITED}
    inherited["runtime_path"] = inherited["runtime_path"] or default
    for entry in merged.values():
        if default and entry.get("inherit_default_runtime") is True:
            entry.update(inherited)
    return HandlerFacts(
        cri="crio",
        files=tuple(source for source, _ in read),
        handlers=tuple(
            _entry(name, entry, entry, "runtime_config_path", "allowed_annotations")
            for name, entry in merged.items()
        ),
        unreadable=tuple(unreadable),
        default=default,
        hook_directories=next(
            (
                tuple(str(p).rstrip("/") for p in each)
                for each in hooks[::-1]
                if isinstance(each, list)
            ),
            (HOOKS[0],),
        ),
    )


def imports_of(text: str) -> tuple[str, ...] | None:
    """The import patterns of containerd's main file; None if it has none."""
    try:
        found = parse_toml(text).get("imports")
    except Malformed:
        return None
    if not isinstance(found, list):
        return None
    return tuple(p for p in found if isinstance(p, str) and p.isprintable())


def enabled_cdi(texts: Iterable[str]) -> bool | None:
    """Read enable_cdi of containerd, as the last file sets it; None if none does."""
    found = None
    for _, document in _parsed(("", text) for text in texts)[0]:
        for place in _CONTAINERD:
            flag = _table(document, place[:2]).get("enable_cdi")
            found = flag if isinstance(flag, bool) else found
    return found


def _parsed(
    files: Iterable[tuple[str, str]], *, is_unsure: bool = False
) -> tuple[list[tuple[str, dict[str, Any]]], list[UnreadFile]]:
    """Texts as TOML, and those that are not, with the reason."""
    found, unreadable = [], []
    for source, text in files:
        try:
            found.append((source, parse_toml(text.removeprefix(_MARK))))
        except Malformed as error:
            place = f"{source}:{line_of(error, text)}"
            unreadable.append(UnreadFile(place, f"not valid TOML: {error}", is_unsure=is_unsure))
    return found, unreadable


def _take(
    merged: dict[str, dict[str, Any]], table: Mapping[str, Any], source: str, plugin: str
) -> None:
    for name, entry in table.items():
        if isinstance(entry, dict):
            before = merged.get(name, {})
            options = {**_table(before, ("options",)), **_table(entry, ("options",))}
            _, plugins = before.get("", ("", ()))
            place = (source, (*plugins, plugin))
            merged[name] = {**before, **entry, "options": options, "": place}


def _table(document: Mapping[str, Any], place: Iterable[str]) -> Mapping[str, Any]:
    here: Any = document
    for name in place:
        here = here.get(name) if isinstance(here, dict) else None
    return here if isinstance(here, dict) else {}


def _entry(
    name: str, entry: Mapping[str, Any], options: Mapping[str, Any], config: str, annotations: str
) -> HandlerEntry:
    """`config` is the key of Kata's configuration in `options`, `annotations` that of patterns."""
    patterns, systemd = entry.get(annotations), options.get("SystemdCgroup")
    source, plugins = entry[""]
    return HandlerEntry(
        name=name,
        source=source,
        plugins=plugins,
        runtime_type=_text(entry, "runtime_type"),
        runtime_path=_text(entry, "runtime_path"),
        config_path=_text(options, config),
        privileged_without_host_devices=entry.get("privileged_without_host_devices") is True,
        pod_annotations=tuple(map(str, patterns)) if isinstance(patterns, list) else (),
        systemd_cgroup=systemd if isinstance(systemd, bool) else None,
        binary=_text(options, "BinaryName"),
        monitor_path=_text(entry, "monitor_path"),
    )


def _last(texts: Iterable[str]) -> str:
    """The last one that is set."""
    return next(filter(None, reversed(list(texts))), "")


def _text(entry: Mapping[str, Any], key: str) -> str:
    found = entry.get(key)
    return found if isinstance(found, str) and found.isprintable() else ""


def _disables_cri(document: Mapping[str, Any]) -> bool:
    """The packages of containerd.io from Docker disable CRI."""
    names = document.get("disabled_plugins")
    return isinstance(names, list) and any(place[1] in names for place in _CONTAINERD)
