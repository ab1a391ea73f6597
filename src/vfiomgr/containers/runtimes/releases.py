"""Files of containerd's configuration that are of another version than the main one.

What releases make of them was tried with real builds of 1.6.20, 1.7.24, 1.7.28, 2.0.11, 2.1.9
and 2.3.4. Before 2.3 the version of the last file that states one counts for all of them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from vfiomgr.containers.runtimes import text, values
from vfiomgr.containers.runtimes.handlers import MixedVersions
from vfiomgr.diagnostic import blocker, refusal, refuse
from vfiomgr.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.containers.runtimes.handlers import MixtureEffect
    from vfiomgr.containers.runtimes.model import ConfigFile, Key, RuntimeFacts, RuntimeRequest
    from vfiomgr.errors import Refusal


_V2, _V3 = 2, 3
_MERGES = Version(2, 0)
_COMPARES = Version(2, 3)
"""Since when versions of files are compared as they are read."""


def mixed_versions(
    main: ConfigFile, imported: Iterable[ConfigFile], version: Version | None
) -> Iterator[MixedVersions]:
    """What a containerd makes of imported files whose version is not that of the main one.

    Raises:
        InvalidDocument: a file cannot be read.

    """
    told = text.parse(main.text or "", main.path).get("version")
    for file in imported:
        data = text.parse(file.text or "", file.path)
        other = data.get("version")
        if other == told or file.path == main.path or not data:
            continue
        both = f"{file.path} is of version {other} and {main.path} of version {told}"
        if other is None:
            yield MixedVersions(
                file.path,
                f"{file.path} tells no version, and what each release of containerd makes of that "
                "was not tried",
                f"begin it with version = {told}, if it is written so",
            )
        elif (told, other) == (_V2, _V3):
            effect, how = _newer_file(version)
            remedy = "make both the same: containerd config migrate"
            yield MixedVersions(file.path, f"{both}: {how}", remedy, effect)
        elif (told, other) == (_V3, _V2):
            effect, how = _older_file(version)
            remedy = f"make it one of version 3: containerd --config {file.path} config migrate"
            if how:
                yield MixedVersions(file.path, f"{both}: {how}", remedy, effect)
        else:
            yield MixedVersions(
                file.path,
                f"{both}: what containerd makes of that was not tried",
                "make both the same",
            )


def _refuses_version_3(version: Version) -> bool:
    """Whether a containerd before 2.0 does not start with version 3 as the last that is stated.

    Older ones read such a file, and know none of its plugins (ValidateV2 in config.go).
    """
    return Version(1, 6, 32) <= version < Version(1, 7) or version >= Version(1, 7, 17)


def _newer_file(version: Version | None) -> tuple[MixtureEffect, str]:
    if version is None:
        return "unknown", (
            "containerd 2.0 to 2.2 drops what was said of CRI before it, this entry too; most "
            "others do not start"
        )
    if not _refuses_version_3(version) and version < _MERGES:
        return "ignored", f"containerd {version} takes nothing of it, without a word"
    if _MERGES <= version < _COMPARES:
        return "hides", (
            f"containerd {version} drops without a word what was said of CRI before it, in the "
            "main file and in drop-ins"
        )
    return "stops", f"containerd {version} does not start with them"


def _older_file(version: Version | None) -> tuple[MixtureEffect, str]:
    if version is None:
        return "unknown", "containerd 2.0 to 2.2 takes nothing of it"
    if version < _MERGES:
        return "hides", f"containerd {version} takes nothing of what the main file says of CRI"
    if version < _COMPARES:
        return "ignored", f"containerd {version} takes nothing of it, without a word"
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
    """Make sure that every file that is imported by its name exists.

    Before 2.0 `config dump` fails without it, since 2.0 it stops reading there, without a word.

    Raises:
        Refusal: one does not.

    """
    for one in facts.missing:
        message = f"cannot read {one.path}: {one.importer} imports it, and it does not exist"
        hint = f"create it, or remove it from imports in {one.importer}"
        refuse(
            "runtime-import-missing",
            one.path,
            message,
            f"{hint}: containerd does not start without it",
        )


def refuse_old(facts: RuntimeFacts, request: RuntimeRequest) -> None:
    """Make sure that containerd takes the path of a shim (runtime_path, since 1.6).

    Raises:
        Refusal: it is older.

    """
    if request.is_kata and facts.version is not None and facts.version < _TAKES_SHIMS:
        message = (
            f"cannot add {request.subject}: it needs containerd 1.6, and this is {facts.version}"
        )
        refuse("runtime-too-old", "containerd", message, "install containerd 1.6 or later")


def refuse_unsure(facts: RuntimeFacts) -> None:
    """Make sure that the files that a containerd imports are known.

    Raises:
        Refusal: that depends on its release, which is not known to the third number.

    """
    if facts.unsure:
        message = (
            f"cannot tell which files {facts.main.path} imports: "
            f"{', '.join(facts.unsure)} is relative to the working directory up to containerd "
            "1.6.28 and 1.7.15, and to that file in later releases"
        )
        refuse(
            "runtime-release-unknown",
            facts.main.path,
            message,
            "pass the release in full, e.g. --containerd-version 1.7.24",
        )


def refuse_dormant(
    facts: RuntimeFacts, files: Iterable[tuple[str, values.Data]], key: Key, request: RuntimeRequest
) -> None:
    """Make sure that no setting of the image store takes effect because of an entry.

    Releases 2.0 to 2.2 ignore these settings of a configuration of version 2 that has no table of
    runtimes (migrateConfig in plugins/cri/images/plugin.go). `key` is the table that has both.

    Raises:
        Refusal: one would.

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
                raise _dormant(setting, name, path, facts, request)


def _dormant(
    setting: str, name: str, path: str, facts: RuntimeFacts, request: RuntimeRequest
) -> Refusal:
    message = (
        f"cannot add {request.subject}: containerd {facts.version} ignores {setting} in {path} "
        "while no runtime is configured there, and would apply it with this entry"
    )
    hint = (
        f"to keep {json.dumps(_DORMANT[name])}, remove {name} from {path}; to apply the setting, "
        "add an entry for runc there; then run the command again"
    )
    return refusal([blocker("runtime-setting-dormant", path, message, hint)])
