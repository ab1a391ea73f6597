"""Files of containerd's configuration that are of another version than the main one.

What releases make of them was tried with real builds of 1.7.28, 2.0.11, 2.1.9 and 2.3.4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.adapters.runtimes import text
from vfiomgr.model.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.model.runtime import ConfigFile

_V2, _V3 = 2, 3
_MERGES = Version(2, 0)
_COMPARES = Version(2, 3)
"""Since when versions of files are compared as they are read."""


def mixed_versions(
    main: ConfigFile, imported: Iterable[ConfigFile], version: Version | None
) -> Iterator[str]:
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
        if other is None:
            yield (
                f"{file.path} tells no version, and what each release of containerd makes of that "
                f"was not tried: begin it with version = {told}, if it is written so"
            )
        elif (told, other) == (_V2, _V3):
            yield (
                f"{file.path} is of version 3 and {main.path} of version 2: "
                f"{_newer_file(version)}. Make both the same: containerd config migrate"
            )
        elif (told, other) == (_V3, _V2):
            effect = _older_file(version)
            if effect:
                yield (
                    f"{file.path} is of version 2 and {main.path} of version 3: {effect}. Make "
                    f"it one of version 3: containerd --config {file.path} config migrate"
                )
        else:
            yield (
                f"{file.path} is of version {other} and {main.path} of version {told}: what "
                "containerd makes of that was not tried. Make both the same"
            )


def _newer_file(version: Version | None) -> str:
    if version is None:
        return (
            "containerd 2.0 to 2.2 drops what was said of CRI before it, this entry too; others do "
            "not start"
        )
    if _MERGES <= version < _COMPARES:
        return (
            f"containerd {version} drops without a word what was said of CRI before it, in the "
            "main file and in drop-ins"
        )
    return f"containerd {version} does not start with them"


def _older_file(version: Version | None) -> str:
    if version is None:
        return "containerd 2.0 to 2.2 takes nothing of it"
    if version < _MERGES:
        return f"containerd {version} does not start with them"
    if version < _COMPARES:
        return f"containerd {version} takes nothing of it, without a word"
    return ""
