"""CDI specifications on a host, as consumers find them."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from vfiomgr.model.cdi import DYNAMIC, STATIC, CdiFile
from vfiomgr.model.path import HostPath

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.host.tree import HostTree

_SUFFIXES = (".json", ".yaml", ".yml")
"""Of the last no consumer reads any; some people write them all the same."""
_DEPTH = 4
_RUN = HostPath("/run/cdi")


def read_cdi_files(tree: HostTree) -> tuple[CdiFile, ...]:
    """The specifications in /etc/cdi and /var/run/cdi, and below them."""
    dynamic = DYNAMIC if tree.exists(DYNAMIC.parent) else _RUN
    found = [
        _read(tree, path, HostPath(f"{name}{path.removeprefix(place)}"))
        for name, place in ((STATIC, STATIC), (DYNAMIC, dynamic))
        for path in _files(tree, place, _DEPTH)
    ]
    return tuple(found)


def _files(tree: HostTree, directory: HostPath, depth: int) -> Iterator[HostPath]:
    for name in tree.children(directory):
        path = directory / name
        status = tree.status(path)
        if status is not None and stat.S_ISDIR(status.st_mode):
            if depth:
                yield from _files(tree, path, depth - 1)
        elif name.lower().endswith(_SUFFIXES):
            yield path


def _read(tree: HostTree, place: HostPath, path: HostPath) -> CdiFile:
    data = tree.read_whole(place)
    if data is None:
        return CdiFile(path, None, "it cannot be opened")
    try:
        return CdiFile(path, data.decode())
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        return CdiFile(path, None, f"no UTF-8 text in line {line}")
