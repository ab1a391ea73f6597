"""The files that a Kata guest boots from, as far as the host shows them."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from vfiomgr.model.kata_image import GuestFile, file_system_of
from vfiomgr.model.path import HostPath

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


def read_guest_file(tree: HostTree, key: str, path: str) -> GuestFile:
    """What is there of a file; of an image also its file system."""
    resolved = tree.resolve(HostPath(path)) if path.startswith("/") else None
    status = None if resolved is None else tree.status(resolved)
    if resolved is None or status is None:
        return GuestFile(key, path, None)
    is_regular = stat.S_ISREG(status.st_mode)
    kind = None
    if key == "image" and is_regular:
        kind = file_system_of(lambda start, length: tree.read_part(resolved, start, length))
    return GuestFile(key, path, str(resolved), status.st_size, kind, is_regular)
