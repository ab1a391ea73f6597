"""The files that a Kata guest boots from, as far as the host shows them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vfiomgr.model.kata_image import GuestFile, file_system_of
from vfiomgr.model.path import HostPath

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_MOST_LINKS = 40
"""As many as the kernel follows (MAXSYMLINKS in include/linux/namei.h)."""


def followed(tree: HostTree, path: HostPath) -> HostPath | None:
    """Where the links of a file lead; absolute ones, which Kata's are, lead on within the tree."""
    for _ in range(_MOST_LINKS):
        target = tree.link(path)
        if target is None:
            return path if tree.exists(path) else None
        path = HostPath(os.path.normpath(os.path.join(path.parent, target)))
    return None


def read_guest_file(tree: HostTree, key: str, path: str) -> GuestFile:
    """What is there of a file; of an image also its file system."""
    resolved = followed(tree, HostPath(path)) if path.startswith("/") else None
    status = None if resolved is None else tree.status(resolved)
    if resolved is None or status is None:
        return GuestFile(key, path, None)
    kind = None
    if key == "image":
        kind = file_system_of(lambda start, length: tree.read_part(resolved, start, length))
    return GuestFile(key, path, str(resolved), status.st_size, kind)
