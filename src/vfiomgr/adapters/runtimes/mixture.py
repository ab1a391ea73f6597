"""Files of containerd's configuration that are of another version than the main one.

What releases make of them was tried with real builds of 1.6.20, 1.7.24, 1.7.28, 2.0.11, 2.1.9
and 2.3.4. Before 2.3 the version of the last file that states one counts for all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.adapters.runtimes import text
from vfiomgr.model.handler import MixedVersions
from vfiomgr.model.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.model.handler import MixtureEffect
    from vfiomgr.model.runtime import ConfigFile

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
