"""Entries for containerd 1.6 to 2.3, in configurations of version 2 and later.

Tested with real builds: before 2.0 an imported file replaces the entire table of a plugin; since
2.0 tables are merged if the imported file has the version of the main one
(cmd/containerd/server/config/config.go). Before 2.0 the runtimes table in a file replaces
containerd's own, so runc is lost unless the file has it. Before 2.3 the version of the last file
that states one applies to all of them.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

from vfiomgr.containers.runtimes import text, values
from vfiomgr.containers.runtimes.handlers import MixedVersions, MixtureEffect, first_reader
from vfiomgr.containers.runtimes.model import (
    ConfigFile,
    Key,
    RuntimeFacts,
    RuntimeRequest,
    Setting,
    covers,
)
from vfiomgr.containers.runtimes.record import HEAD, Decision, Edit
from vfiomgr.diagnostic import refuse
from vfiomgr.units import Version
from vfiomgr.value import Value

_COMPARES = Version(2, 3)
"""The release that compares versions when it reads files."""


def mixed_versions(
    main: ConfigFile, imported: Iterable[ConfigFile], version: Version | None
) -> Iterator[MixedVersions]:
    """How a containerd reads imported files with another version than the main one.

    Raises:
        InvalidDocument: a file is not readable.
    """
    told = text.parse(main.text or "", main.path).get("version")
    for file in imported:
        data = text.parse(file.text or "", file.path)
        other = data.get("version")
        if other == told or file.path == main.path or not data:
            continue
        both = f"{file.path} has version {other}, but {main.path} has version {told}"
        if other is None:
            yield MixedVersions(
                file.path,
                f"{file.path} states no version; how containerd reads it is untested",
                f"add version = {told} at the start, if the file is written for it",
            )
        elif (told, other) in _NEWER:
            effect, how = _newer_file(version, other)
            remedy = "use the same version in both: containerd config migrate"
            yield MixedVersions(file.path, f"{both}: {how}", remedy, effect)
        elif (told, other) == (_V3, _V2):
            effect, how = _older_file(version)
            path = shlex.quote(file.path)
            remedy = f"convert it to version 3: containerd --config {path} config migrate"
            if how:
                yield MixedVersions(file.path, f"{both}: {how}", remedy, effect)
        elif told != _V4 or version is None or version < _COMPARES:
            yield MixedVersions(
                file.path,
                f"{both}: how containerd reads this is untested",
                "use the same version in both",
            )


def refuses_schema(version: Version, schema: int) -> bool:
    """Whether a containerd does not start with a version of the configuration that is stated last.

    Some before 2.0 read such a file, but know none of its plugins (ValidateV2 in config.go).
    """
    is_late_1_6 = Version(1, 6, 32) <= version < Version(1, 7)
    return version < first_reader(schema) and (is_late_1_6 or version >= Version(1, 7, 17))


def _newer_file(version: Version | None, schema: int) -> tuple[MixtureEffect, str]:
    if version is None and schema == _V4:
        return "unknown", "containerd does not start with them, except some releases before 2.0"
    if version is None:
        return "unknown", (
            "containerd 2.0 to 2.2 drops all previous CRI settings, including this entry; most "
            "other releases do not start"
        )
    is_refused = version >= _COMPARES or refuses_schema(version, schema)
    if not is_refused and version < _MERGES:
        return "ignored", f"containerd {version} silently ignores it"
    if not is_refused:
        return "hides", (
            f"containerd {version} silently drops all previous CRI settings, in the main file "
            "and in drop-ins"
        )
    return "stops", f"containerd {version} does not start with them"


def _older_file(version: Version | None) -> tuple[MixtureEffect, str]:
    if version is None:
        return "unknown", "containerd 2.0 to 2.2 ignores it"
    if version < _MERGES:
        return "hides", f"containerd {version} ignores the CRI settings of the main file"
    if version < _COMPARES:
        return "ignored", f"containerd {version} silently ignores it"
    return "unknown", ""


_TAKES_SHIMS = Version(1, 6)
_FIRST, _LAST = Version(2, 0), Version(2, 3)
"""From one release on, and before another, settings of the image store depend on the runtimes."""
_DORMANT = {
    "snapshotter": "overlayfs",
    "disable_snapshot_annotations": True,
    "discard_unpacked_layers": False,
}
"""Settings beside the runtimes that belong to the image store since 2.0, with their defaults."""


def refuse_missing(facts: RuntimeFacts) -> None:
    """Make sure that every file that is imported by name exists.

    Before 2.0 `config dump` fails without it; since 2.0 it silently stops there.
    """
    for one in facts.missing:
        message = f"{one.importer} imports {one.path}, which does not exist"
        hint = f"create it, or remove it from imports in {one.importer}"
        refuse(
            "runtime-import-missing",
            one.path,
            message,
            f"{hint}; containerd does not start without it",
        )


def refuse_old(facts: RuntimeFacts, request: RuntimeRequest) -> None:
    """Make sure that containerd supports the path of a shim (runtime_path, since 1.6)."""
    if request.is_kata and facts.version is not None and facts.version < _TAKES_SHIMS:
        message = (
            f"cannot add {request.subject}: it needs containerd 1.6 or later; this is "
            f"{facts.version}"
        )
        refuse("runtime-too-old", "containerd", message, "install containerd 1.6 or later")


def refuse_unsure(facts: RuntimeFacts) -> None:
    """Make sure that the imported files of a containerd are known."""
    if facts.unsure:
        message = (
            f"cannot determine the imports of {facts.main.path}: {', '.join(facts.unsure)} is "
            "relative to the working directory up to containerd 1.6.28 and 1.7.15, and to that "
            "file in later releases"
        )
        refuse(
            "runtime-release-unknown",
            facts.main.path,
            message,
            "pass the full release, e.g. --containerd-version 1.7.24",
        )


def refuse_dormant(
    facts: RuntimeFacts, files: Iterable[tuple[str, values.Data]], key: Key, request: RuntimeRequest
) -> None:
    """Make sure that an entry does not activate a setting of the image store.

    Releases 2.0 to 2.2 ignore these settings in a configuration of version 2 without a table of
    runtimes (migrateConfig in plugins/cri/images/plugin.go). `key` is the table that has both.
    """
    if facts.version is None or not _FIRST <= facts.version < _LAST:
        return
    tables = [(path, values.found(data, key)) for path, data in files]
    told = [(path, table) for path, table in tables if isinstance(table, dict)]
    if any("runtimes" in table for _, table in told):
        return
    for path, table in told:
        for name, default in _DORMANT.items():
            if table.get(name, default) != default:
                setting = f"{name} = {json.dumps(table[name])}"
                _refuse_setting(setting, name, path, facts, request)


def _refuse_setting(
    setting: str, name: str, path: str, facts: RuntimeFacts, request: RuntimeRequest
) -> NoReturn:
    message = (
        f"cannot add {request.subject}: containerd {facts.version} ignores {setting} in {path} "
        "while no runtime is configured there, but would apply it with this entry"
    )
    hint = (
        f"to keep {json.dumps(_DORMANT[name])}, remove {name} from {path}; to apply the setting, "
        "add an entry for runc there; then run the command again"
    )
    refuse("runtime-setting-dormant", path, message, hint)


CRI_V2 = "io.containerd.grpc.v1.cri"
CRI_V3 = "io.containerd.cri.v1.runtime"
"""From version 3 of the configuration on, which containerd 2.0 introduced."""
CRI_NAMES = (CRI_V3, CRI_V2)
_DISABLING = frozenset({"cri", CRI_V2, CRI_V3})
_RUNC = "io.containerd.runc.v2"
_V2, _V3, _V4 = 2, 3, 4
_NEWER = ((_V2, _V3), (_V2, _V4), (_V3, _V4))
"""Versions of the main file and of an import that is newer."""
_MERGES = Version(2, 0)
"""The release that introduced merging of imported tables."""
_KNOWS_CDI = Version(1, 7)
_MISREADS_SNAPSHOTTER = Version(2, 3)
_TRIED = (Version(1, 6), Version(2, 4))
"""From one release on, and before another."""
_CONFIG_VERSION = ("version",)
_IMPORTS = ("imports",)


def decide(facts: RuntimeFacts, request: RuntimeRequest) -> Decision:
    """Decide how to add an entry to containerd's configuration.

    Raises:
        InvalidDocument: a file is not readable.
        Refusal: containerd would not accept the entry, or would lose other settings.
    """
    files = _Files(facts)
    refuse_missing(facts)
    refuse_old(facts, request)
    schema = _schema(facts, files)
    if schema == _V2:
        refuse_unsure(facts)
    _refuse_disabled(files)
    _refuse_foreign(files, request)
    in_place = schema == _V2 and (facts.version is None or facts.version < _MERGES)
    plugin = CRI_V2 if schema == _V2 else CRI_V3
    target = files.effective_cri() if in_place else facts.drop_in
    entry = Setting(
        ("plugins", plugin, "containerd", "runtimes", request.name), _table(files, request)
    )
    settings = [entry, *_further(facts, files, request, plugin)]
    if schema == _V2 and not in_place:
        told = [(file.path, files.data(file)) for file in files.all()]
        refuse_dormant(facts, told, ("plugins", CRI_V2, "containerd"), request)
    notes = [*_notes(facts, files, request, schema, target, in_place=in_place)]
    if in_place:
        settings = [*_kept_runc(files, target), *settings]
        if not files.data(target):
            settings = [Setting(_CONFIG_VERSION, _V2, is_shared=True), *settings]
        edits = [Edit(target, tuple(settings), HEAD)]
    else:
        edits = [
            Edit(facts.drop_in, (*_version_of_drop_in(files, facts, schema), *settings), HEAD),
            *_importing(facts, files, schema),
        ]
    return Decision(
        tuple(edits),
        tuple(notes),
        ours=(
            _IMPORTS,
            _CONFIG_VERSION,
            *(("plugins", cri, *key) for cri in CRI_NAMES for key in _keys_of(request)),
        ),
        expected=tuple(settings),
    )


def _keys_of(request: RuntimeRequest) -> Iterator[Key]:
    yield ("containerd", "runtimes", request.name)
    if request.set_default:
        yield ("containerd", "default_runtime_name")
    if request.enable_cdi:
        yield ("enable_cdi",)


class _Files(Value):
    """The content of the files, and how containerd reads them."""

    facts: RuntimeFacts

    def data(self, file: ConfigFile) -> values.Data:
        """The values of a file."""
        return {} if file.text is None else text.parse(file.text, file.path)

    def all(self) -> tuple[ConfigFile, ...]:
        """In reading order; vfiomgr's own file is always included."""
        others = (file for file in self.facts.imported if file.path != self.facts.drop_in.path)
        return (self.facts.main, *others, self.facts.drop_in)

    def effective_cri(self) -> ConfigFile:
        """The file whose CRI table applies, before 2.0."""
        told = [f for f in (self.facts.main, *self.facts.imported) if _cri(self.data(f))]
        return told[-1] if told else self.facts.main

    def seen(self, *key: str) -> Any:  # noqa: ANN401 - documents hold anything
        """A value below the CRI table, as containerd reads it or else from the files."""
        documents = [self.data(file) for file in self.all()][::-1]
        if self.facts.effective is not None:
            documents = [self.facts.effective]
        for document in documents:
            for plugin in CRI_NAMES:
                value = values.found(document, ("plugins", plugin, *key))
                if value is not values.ABSENT:
                    return value
        return values.ABSENT


def _cri(data: values.Data) -> values.Data:
    for name in CRI_NAMES:
        table = values.found(data, ("plugins", name))
        if table and isinstance(table, dict):
            return table
    return {}


def _schema(facts: RuntimeFacts, files: _Files) -> int:
    """The version of the configuration, existing or new."""
    data, version = files.data(facts.main), facts.version
    if data:
        schema = data.get("version", 1)
        if not isinstance(schema, int) or schema < _V2:
            stated = "" if "version" in data else " (no version is stated)"
            message = f"{facts.main.path} is a configuration of version 1{stated}"
            disabled = " and remove cri from disabled_plugins" if _is_disabled(data) else ""
            refuse(
                "runtime-config-version",
                facts.main.path,
                message,
                "convert it to version 2 or later (containerd 2: containerd config "
                f"migrate){disabled}; then run the command "
                f"again{_for_docker(facts) if disabled else ''}",
            )
        if version is not None and version < first_reader(schema):
            message = (
                f"containerd {version} cannot read {facts.main.path}, a configuration of version "
                f"{schema}"
            )
            refuse(
                "runtime-config-version",
                facts.main.path,
                message,
                f"use containerd {first_reader(schema)} or later, or write that file for an "
                "earlier version; pass --containerd-version if it is for another containerd",
            )
        return schema
    if version is None:
        message = (
            f"cannot tell the configuration version of {facts.main.path}: the file is empty, and "
            "the containerd release is unknown"
        )
        refuse(
            "runtime-release-unknown",
            facts.main.path,
            message,
            "pass --containerd-version, e.g. --containerd-version 2.1",
        )
    return _V2 if version < _MERGES else _V3


def _is_disabled(data: values.Data) -> bool:
    told = data.get("disabled_plugins")
    return isinstance(told, list) and any(name in told for name in _DISABLING)


def _refuse_disabled(files: _Files) -> None:
    for file in files.all():
        if _is_disabled(files.data(file)):
            message = (
                f"{file.path} disables CRI (disabled_plugins), so pods would not find the entry"
            )
            hint = "remove it from disabled_plugins, and run the command again"
            refuse("cri-disabled", file.path, message, f"{hint}{_for_docker(files.facts)}")


def _for_docker(facts: RuntimeFacts) -> str:
    """An alternative if containerd serves no pods."""
    return "; or, for Docker containers, pass --runtime docker" if facts.is_dockers else ""


def _refuse_foreign(files: _Files, request: RuntimeRequest) -> None:
    """Make sure that no entry of another program has the name."""
    key = ("containerd", "runtimes", request.name)
    for file in files.all():
        for plugin in CRI_NAMES:
            if values.found(files.data(file), ("plugins", plugin, *key)) is not values.ABSENT:
                refuse_name(request, f"containerd, in {file.path}")
    if files.facts.effective is not None and files.seen(*key) is not values.ABSENT:
        refuse_name(request, "containerd")


def refuse_name(request: RuntimeRequest, place: str) -> NoReturn:
    """Refuse a name that is in use."""
    message = f"{place}: {request.subject} already exists, and vfiomgr did not write it"
    remedy = f"use another name, e.g. {request.name}-2; or remove that entry manually"
    refuse("runtime-name-taken", place, message, remedy)


def _table(files: _Files, request: RuntimeRequest) -> dict[str, Any]:
    """The table of the entry."""
    if request.config_path is not None:
        return kata_table(request)
    default = files.seen("containerd", "default_runtime_name")
    for name in dict.fromkeys((default, "runc")):
        options = files.seen("containerd", "runtimes", str(name), "options")
        if isinstance(options, dict):
            kept = values.without_zeros(options)
            return oci_table(request, {k: v for k, v in kept.items() if k != "BinaryName"})
    return oci_table(request, {})


def kata_table(request: RuntimeRequest) -> dict[str, Any]:
    """The entry of a Kata handler.

    Without privileged_without_host_devices a privileged pod would get every VFIO group of the host.
    """
    return {
        "runtime_type": f"io.containerd.{request.name}.v2",
        "runtime_path": request.path,
        "privileged_without_host_devices": True,
        "pod_annotations": ["io.katacontainers.*", "cdi.k8s.io/*"],
        "container_annotations": ["io.kubernetes.container.terminationMessage*"],
        "options": {"ConfigPath": request.config_path},
    }


def oci_table(request: RuntimeRequest, options: dict[str, Any]) -> dict[str, Any]:
    """The entry of an OCI runtime, with the options of runc."""
    return {"runtime_type": _RUNC, "options": {"BinaryName": request.path, **options}}


def _further(
    facts: RuntimeFacts, files: _Files, request: RuntimeRequest, plugin: str
) -> Iterator[Setting]:
    if request.set_default:
        yield Setting(("plugins", plugin, "containerd", "default_runtime_name"), request.name)
    if not request.enable_cdi or files.seen("enable_cdi") is True:
        return
    is_asked_for = not request.is_kata
    if facts.version is not None and facts.version < _KNOWS_CDI:
        if is_asked_for:
            message = f"containerd {facts.version} does not support CDI"
            refuse(
                "runtime-without-cdi",
                "containerd",
                message,
                "omit --cdi, or install containerd 1.7 or later",
            )
        return
    is_off = files.seen("enable_cdi") is False
    is_off_by_default = plugin == CRI_V2 and facts.version is not None and facts.version < _MERGES
    if is_off or is_off_by_default or (is_asked_for and plugin == CRI_V2):
        yield Setting(("plugins", plugin, "enable_cdi"), value=True, is_shared=True)


def _kept_runc(files: _Files, target: ConfigFile) -> Iterator[Setting]:
    """Containerd's own entry of runc, if the file would hide it."""
    key = ("plugins", CRI_V2, "containerd", "runtimes")
    if values.found(files.data(target), key) not in (values.ABSENT, {}):
        return
    runc = values.found(files.facts.effective or {}, (*key, "runc"))
    kept = {"runtime_type": _RUNC} if runc is values.ABSENT else values.without_zeros(runc)
    yield Setting((*key, "runc"), kept, is_shared=True)


def _version_of_drop_in(files: _Files, facts: RuntimeFacts, schema: int) -> Iterator[Setting]:
    """The drop-in's version: that of the main file, or containerd silently ignores one."""
    data = files.data(facts.drop_in)
    there = data.get("version")
    if there is None:
        yield Setting(_CONFIG_VERSION, schema, is_shared=True)
    elif there != schema:
        message = (
            f"{facts.drop_in.path} has version {there}, but {facts.main.path} has version {schema}"
        )
        hint = "remove the entries with vfiomgr runtime uninstall, and install them again"
        refuse("runtime-config-version", facts.drop_in.path, message, hint)


def _importing(facts: RuntimeFacts, files: _Files, schema: int) -> Iterator[Edit]:
    """The main file's import of the drop-in.

    Since 2.3 a dump also shows containerd's default imports, so only the files are read.
    """
    data, drop_in = files.data(facts.main), facts.drop_in.path
    if any(covers(pattern, drop_in) for pattern in facts.imports):
        return
    directory, _, name = drop_in.rpartition("/")
    # A pattern finds nothing where nothing is; a plain path that is gone stops containerd. And
    # what else lies there must not come to count by this.
    pattern = f"{directory}/{name.removesuffix('.toml')}*.toml"
    if not any(path.endswith(".toml") for path in facts.beside):
        pattern = f"{directory}/*.toml"
    settings = [Setting(_IMPORTS, pattern, is_item=True, is_shared=True)]
    if not data:
        settings = [Setting(_CONFIG_VERSION, schema, is_shared=True), *settings]
    yield Edit(facts.main, tuple(settings), HEAD)


def _notes(  # noqa: PLR0913 - all that was decided
    facts: RuntimeFacts,
    files: _Files,
    request: RuntimeRequest,
    schema: int,
    target: ConfigFile,
    *,
    in_place: bool,
) -> Iterator[str]:
    if facts.version is None:
        yield (
            f"the containerd release that reads {facts.main.path} is unknown: writing for all "
            "releases with that version (set --containerd-version)"
        )
        if in_place and request.enable_cdi and files.seen("enable_cdi") is not True:
            yield "enable_cdi is not changed: containerd 1.6 has no CDI, and 1.7 needs it for CDI"
    if in_place and target.path != facts.main.path:
        yield (
            f"writing the entry to {target.path}: it is imported by {facts.main.path}, and "
            "before containerd 2.0 its CRI table hides that of the main file"
        )
    others = (file for file in facts.imported if file.path != facts.drop_in.path)
    yield from map(str, mixed_versions(facts.main, others, facts.version))
    yield from _untried(facts.version)
    is_new = facts.version is not None and facts.version >= _MISREADS_SNAPSHOTTER
    if schema == _V2 and is_new:
        named = values.found(
            files.data(facts.main), ("plugins", CRI_V2, "containerd", "snapshotter")
        )
        if named not in (values.ABSENT, "overlayfs"):
            yield (
                f"containerd {facts.version} replaces snapshotter {named} of a version 2 "
                "configuration by overlayfs, with or without this entry; fix it with: "
                "containerd config migrate"
            )


def _untried(version: Version | None) -> Iterator[str]:
    """Whether this containerd release is untested."""
    start, end = _TRIED
    if version is not None and not start <= version < end:
        yield (
            f"containerd {version} is untested (tested: 1.6 to 2.3): compare containerd config "
            "dump before and after"
        )
