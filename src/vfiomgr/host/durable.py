"""Files that are replaced whole, with their owner and label, and survive a power cut."""

from __future__ import annotations

import os
import stat
from errno import ENOTSUP


def replace_file(target: str, data: bytes, mode: int, *, durable: bool) -> None:
    """Replace a file of this machine atomically, as `HostTree.replace` describes."""
    directory, name = os.path.split(target)
    temporary = f"{directory}/.{name}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(temporary, flags, 0o600)
    except FileExistsError:
        os.unlink(temporary)  # of a process of this number that was killed
        descriptor = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            take_over(target, file.fileno())
            os.fchmod(file.fileno(), mode)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError:
        os.unlink(temporary)
        raise
    if durable:
        sync_directory(directory)


def take_over(target: str | int, descriptor: int) -> None:
    """Copy owner and extended attributes (SELinux's label, access lists) of a replaced file."""
    try:
        found = os.lstat(target) if isinstance(target, str) else os.fstat(target)
    except FileNotFoundError:
        return
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


def sync_directory(directory: str) -> None:
    """Make a rename or removal in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
