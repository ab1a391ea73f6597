"""Files that are replaced, with their owner and label, and survive a power cut.

A new file is written as `.NAME.PID` beside the old one, under a lock. A killed run leaves it there;
the next write, removal or repeated step of that file removes it.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOTSUP
from typing import BinaryIO

from vfiomgr.expressions import expression

_TEMPORARY = expression(r"\.(.+)\.([1-9][0-9]{0,8})")


def replace_file(directory: int, name: str, data: bytes, mode: int, *, durable: bool) -> None:
    """Replace a file of an open directory atomically, as `HostTree.replace` describes."""
    with replacing(directory, name, 0o600, durable=durable) as file:
        file.write(data)
        try:
            old = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        except FileNotFoundError:
            pass
        else:
            try:
                take_over(f"/proc/self/fd/{old}", file.fileno())
            finally:
                os.close(old)
        os.fchmod(file.fileno(), mode)


@contextmanager
def replacing(directory: int, name: str, mode: int, *, durable: bool = True) -> Iterator[BinaryIO]:
    """A new file that replaces the one of that name when the block ends without an error."""
    temporary = f".{name}.{os.getpid()}"
    descriptor = _create(directory, temporary, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(descriptor)
            os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)
        raise
    if durable:
        os.fsync(directory)


def _create(directory: int, temporary: str, mode: int) -> int:
    """Create and lock a temporary file."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=directory)  # left by a killed process with this number
        descriptor = os.open(temporary, flags, mode, dir_fd=directory)
        with suppress(OSError):  # without locks, no other run removes the file
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # another run found the file before it was locked


def remove_leftovers(directory: int, name: str | None = None) -> None:
    """Remove temporary files of killed runs: those of one file, or all in vfiomgr's directories."""
    for entry in os.listdir(directory):
        found = _TEMPORARY.fullmatch(entry)
        if found is not None and name in (None, found[1]) and not _is_running(int(found[2])):
            with suppress(OSError):  # it is gone, locked, or cannot be locked here
                _remove_unused(directory, entry)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove_unused(directory: int, entry: str) -> None:
    """Remove a temporary file that no process, e.g. of another PID namespace, has locked.

    Raises:
        OSError: it is in use, or cannot be removed.
    """
    found = os.stat(entry, dir_fd=directory, follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (0, os.geteuid()):
        return
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(entry, flags, dir_fd=directory)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        now = os.stat(entry, dir_fd=directory, follow_symlinks=False)
        if os.path.samestat(now, os.fstat(descriptor)):
            os.unlink(entry, dir_fd=directory)
    finally:
        os.close(descriptor)


def take_over(target: str | int, descriptor: int) -> None:
    """Copy owner and extended attributes (SELinux's label, access lists) of a replaced file."""
    found = os.stat(target)
    if not stat.S_ISREG(found.st_mode):
        return
    own = os.fstat(descriptor)
    if (own.st_uid, own.st_gid) != (found.st_uid, found.st_gid):
        os.fchown(descriptor, found.st_uid, found.st_gid)
    there = _attributes(descriptor)
    for name in _attributes(target):
        value = os.getxattr(target, name)
        if name not in there or os.getxattr(descriptor, name) != value:
            os.setxattr(descriptor, name, value)


def _attributes(file: str | int) -> list[str]:
    """The names of a file's extended attributes; empty if the file system has none."""
    try:
        return os.listxattr(file)
    except OSError as error:
        if error.errno == ENOTSUP:
            return []
        raise
