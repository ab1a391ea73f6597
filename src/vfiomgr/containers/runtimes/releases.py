"""Files of containerd's configuration with another version than the main one.

Tested with real builds of 1.6.20, 1.7.24, 1.7.28, 2.0.11, 2.1.9 and 2.3.4. Before 2.3 the version
of the last file that states one applies to all of them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NoReturn

from vfiomgr.containers.runtimes import text, values
from vfiomgr.containers.runtimes.handlers import MixedVersions
from vfiomgr.diagnostic import refuse
from vfiomgr.units import Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.containers.runtimes.handlers import MixtureEffect
    from vfiomgr.containers.runtimes.model import ConfigFile, Key, RuntimeFacts, RuntimeRequest


_V2, _V3 = 2, 3
_MERGES = Version(2, 0)
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
        elif (told, other) == (_V2, _V3):
            effect, how = _newer_file(version)
            remedy = "use the same version in both: containerd config migrate"
            yield MixedVersions(file.path, f"{both}: {how}", remedy, effect)
        elif (told, other) == (_V3, _V2):
            effect, how = _older_file(version)
            remedy = f"convert it to version 3: containerd --config {file.path} config migrate"
            if how:
                yield MixedVersions(file.path, f"{both}: {how}", remedy, effect)
        else:
            yield MixedVersions(
                file.path,
                f"{both}: how containerd reads this is untested",
                "use the same version in both",
            )


def _refuses_version_3(version: Version) -> bool:
    """Whether a containerd before 2.0 does not start if version 3 is stated last.

    Older ones read such a file, but know none of its plugins (ValidateV2 in config.go).
    """
    return Version(1, 6, 32) <= version < Version(1, 7) or version >= Version(1, 7, 17)


def _newer_file(version: Version | None) -> tuple[MixtureEffect, str]:
    if version is None:
        return "unknown", (
            "containerd 2.0 to 2.2 drops all previous CRI settings, including this entry; most "
            "other releases do not start"
        )
    if not _refuses_version_3(version) and version < _MERGES:
        return "ignored", f"containerd {version} silently ignores it"
    if _MERGES <= version < _COMPARES:
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
