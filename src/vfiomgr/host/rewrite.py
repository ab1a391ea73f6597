"""Files that users name, exchanged whole: all of the new text or all of the old one."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from vfiomgr.errors import HostError
from vfiomgr.host.reach import reach
from vfiomgr.host.tree import take_over

if TYPE_CHECKING:
    from vfiomgr.host.reach import Reached

_NEW_MODE = 0o666
"""Before the umask, as for any file that a program makes."""


def rewrite(path: str, before: bytes | None, after: bytes, *, makes_parents: bool = False) -> None:
    """Put a text in the place of another, atomically; mode, owner and label are kept.

    A link stays a link: what it leads to is exchanged. What is no regular file is written to.
    With `before`, the file must still hold that.

    Raises:
        HostError: it cannot be written, or was changed meanwhile; it is as it was.

    """
    try:
        with reach(path, makes_parents=makes_parents) as file:
            if file.status is None or stat.S_ISREG(file.status.st_mode):
                _exchange(file, before, after)
            else:
                _write_to(file, after)
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror or error}"
        raise HostError(message, "run as its owner, or name another file") from error


def read_own(path: str, limit: int) -> bytes:
    """The first bytes of a file that belongs to whoever has its directory, or to root.

    Raises:
        OSError: it cannot be opened.
        HostError: it is a link, no regular file, or somebody else's.

    """
    with reach(path, follows=False) as file:
        _require_own(file)
        return file.read(limit)


def rewrite_own(path: str, before: bytes, after: bytes) -> None:
    """As `rewrite`, for a file that `read_own` has read.

    Raises:
        HostError: as the two.

    """
    try:
        with reach(path, follows=False) as file:
            _require_own(file)
            _exchange(file, before, after)
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror or error}"
        raise HostError(message, "run as its owner, or name another file") from error


def _require_own(file: Reached) -> None:
    """Make sure that no other user's file has been put, or linked, into a directory."""
    found, owner = file.status, os.fstat(file.directory).st_uid
    if found is None:
        return
    if not stat.S_ISREG(found.st_mode):
        why, remedy = "not a regular file", "put a regular file there"
    elif found.st_uid not in (0, owner):
        why = f"user {found.st_uid} owns it, and user {owner} its directory"
        remedy = f"chown {owner} {file.path}"
    elif found.st_nlink > 1:
        why = f"it has {found.st_nlink} names (hard links)"
        remedy = "put a copy in its place, which is not linked from elsewhere"
    else:
        return
    message = f"cannot use {file.path}: {why}"
    raise HostError(message, remedy)


def _write_to(file: Reached, after: bytes) -> None:
    """Write to a pipe or a device, which nothing can take the place of."""
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NOCTTY | os.O_CLOEXEC
    with open(os.open(file.name, flags, dir_fd=file.directory), "wb") as out:
        out.write(after)


def _exchange(file: Reached, before: bytes | None, after: bytes) -> None:
    directory = file.directory
    temporary = f".{file.name}.{os.getpid()}"
    with suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=directory)  # of a process of this number that was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    mode = _NEW_MODE if file.status is None else 0o600
    descriptor = os.open(temporary, flags, mode, dir_fd=directory)
    try:
        with os.fdopen(descriptor, "wb") as made:
            made.write(after)
            made.flush()
            if file.status is not None:
                _keep(file, made.fileno())
            os.fsync(made.fileno())
        if before is not None and file.read(len(before) + 1) != before:
            message = f"{file.path} was changed meanwhile, and not by this command"
            raise HostError(message, "look at it, then run the command again")
        os.replace(temporary, file.name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(temporary, dir_fd=directory)
        raise
    os.fsync(directory)


def _keep(file: Reached, made: int) -> None:
    """Give the new file the owner, the label and the mode of the old one."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    old = os.open(file.name, flags, dir_fd=file.directory)
    try:
        take_over(old, made)
        os.fchmod(made, stat.S_IMODE(os.fstat(old).st_mode))
    finally:
        os.close(old)
