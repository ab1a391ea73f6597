"""The files that an entry changes: their texts, their backups, and the locks of the change."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from vfiomgr.containers.runtimes.containerd import CRI_NAMES
from vfiomgr.containers.runtimes.facts import read_config
from vfiomgr.containers.runtimes.record import RECORD
from vfiomgr.paths import HostPath
from vfiomgr.persistence.steps import ChangeFiles, FileChange

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vfiomgr.containers.runtimes.facts import Texts
    from vfiomgr.containers.runtimes.location import RuntimeLocation
    from vfiomgr.containers.runtimes.model import Key
    from vfiomgr.containers.runtimes.record import InstalledRuntime
    from vfiomgr.host.tree import HostTree

_LOCK = "runtimes"
_COPY = ".vfiomgr-"
"""Between the name of a file and the time of the copy."""
DEFAULTS: tuple[Key, ...] = (
    *(("plugins", cri, "containerd", "default_runtime_name") for cri in CRI_NAMES),
    ("crio", "runtime", "default_runtime"),
    ("default-runtime",),
)
"""The keys that name the default runtime."""


def texts_of(tree: HostTree, runtime: InstalledRuntime) -> Texts:
    """The present texts of the files with entries."""
    return {file.path: tree.read_text(HostPath(file.path)) for file in runtime.files}


def file_changes(
    tree: HostTree, before: Mapping[str, str | None], after: Mapping[str, str | None]
) -> Iterator[FileChange]:
    """The changes of files, from the texts that the new ones were made from.

    That way changes of other programs in between are not lost.
    """
    for path, new in after.items():
        old = before[path] if path in before else tree.read_text(HostPath(path))
        if old != new:
            yield FileChange(path, old, new, _mode(tree, path))


def _mode(tree: HostTree, path: str) -> int:
    return 0o600 if path == RECORD else read_config(tree, HostPath(path)).mode


def backup_path(path: str) -> str:
    """The path of a backup that is made now."""
    return f"{path}{_COPY}{_stamp()}"


def _stamp() -> str:
    """The time of a copy, as part of its name."""
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())


def backups_of(tree: HostTree, path: str) -> list[str]:
    """The copies of a file that vfiomgr made, the latest last."""
    place = HostPath(path)
    names = sorted(tree.children(place.parent))
    return [place.parent / name for name in names if name.startswith(f"{place.name}{_COPY}")]


def no_change(place: RuntimeLocation, name: str, why: str) -> ChangeFiles:
    """A request that changes nothing."""
    return ChangeFiles(why, (), lock_names(place, name), already=(why,))


def lock_names(place: RuntimeLocation, name: str) -> tuple[str, ...]:
    """The second lock is per entry: a run for one entry does not affect another one."""
    return (_LOCK, f"{_LOCK}-{place.program}-{name}")
