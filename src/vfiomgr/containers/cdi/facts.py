"""CDI specifications on a host, as consumers find them."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.containers.cdi.model import DYNAMIC, OLD_DYNAMIC, STATIC, CdiFile
from vfiomgr.errors import HostError

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.paths import HostPath

_SUFFIXES = (".json", ".yaml", ".yml")
"""No consumer reads the last one; some people write such files anyway."""
_DEPTH = 4


def read_cdi_files(tree: HostTree) -> tuple[CdiFile, ...]:
    """Read the specifications in /etc/cdi and /run/cdi, including subdirectories."""
    return tuple(_read(tree, path) for path in list_cdi_files(tree))


def list_cdi_files(tree: HostTree) -> Iterator[HostPath]:
    """The paths of the specifications.

    Consumers know /run/cdi as /var/run/cdi, which differs if /var/run is not a link.
    """
    status = tree.status(OLD_DYNAMIC.parent)
    is_another = status is not None and stat.S_ISDIR(status.st_mode)
    for place in (STATIC, OLD_DYNAMIC if is_another else DYNAMIC):
        yield from _files(tree, place, _DEPTH)


def _files(tree: HostTree, directory: HostPath, depth: int) -> Iterator[HostPath]:
    for name in tree.children(directory):
        path = directory / name
        status = tree.status(path)
        if status is not None and stat.S_ISDIR(status.st_mode):
            if depth:
                yield from _files(tree, path, depth - 1)
        elif name.lower().endswith(_SUFFIXES):
            yield path


def _read(tree: HostTree, path: HostPath) -> CdiFile:
    try:
        data = tree.read_whole(path)
    except HostError as error:
        return CdiFile(path, None, error.message)
    if data is None:
        return CdiFile(path, None, "cannot open it")
    try:
        return CdiFile(path, data.decode())
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        return CdiFile(path, None, f"not UTF-8 text in line {line}")
