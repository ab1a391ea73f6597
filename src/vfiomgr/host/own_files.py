"""Files of vfiomgr itself: only read if nobody else can have created them.

Recovery acts as root on what it reads. A link, a FIFO or a file that another user may write is not
a record, whatever it contains.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.paths import HostPath

MOST_BYTES = 64 << 20
"""Far more than the largest record; longer files are not read into memory."""
_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class NotARecord(Exception):  # noqa: N818 - it says what the file is
    """A file in vfiomgr's own directories that is not a record; the text says why."""


def open_own(tree: HostTree, file: HostPath) -> int:
    """Open a record for reading; never waits and never opens a device.

    Raises:
        FileNotFoundError: it does not exist.
        PermissionError: this user may not read it.
        NotARecord: it is not a regular file, or others may write it.

    """
    name = tree.locate(file)
    _require_regular(os.lstat(name))
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(name, flags)
    try:
        found = os.fstat(descriptor)
        _require_regular(found)
        _require_ours(tree, found)
    except NotARecord:
        os.close(descriptor)
        raise
    return descriptor


def read_own(tree: HostTree, file: HostPath, limit: int = MOST_BYTES) -> bytes:
    """All bytes of a record.

    Raises:
        OSError: it does not exist, or cannot be read.
        NotARecord: it is not a regular file, others may write it, or it is too large.

    """
    with os.fdopen(open_own(tree, file), "rb") as source:
        data = source.read(limit + 1)
    if len(data) > limit:
        message = f"it is larger than {limit} bytes"
        raise NotARecord(message)
    return data


def _require_regular(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "not a regular file")
        message = f"it is {kind}"
        raise NotARecord(message)


_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a character device",
}


def _require_ours(tree: HostTree, found: os.stat_result) -> None:
    """Check owner and mode; a recorded host may belong to anyone, since it is not changed."""
    if not tree.is_live:
        return
    if found.st_uid not in (0, os.geteuid()):
        message = f"its owner is user {found.st_uid}, not root"
        raise NotARecord(message)
    if found.st_mode & _BY_OTHERS:
        message = f"others may write it (mode {stat.S_IMODE(found.st_mode):04o})"
        raise NotARecord(message)
