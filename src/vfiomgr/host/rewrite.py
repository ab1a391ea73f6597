"""Files that users name, replaced atomically."""

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
"""The mode before the umask, as for any new file."""


def rewrite(path: str, before: bytes | None, after: bytes, *, makes_parents: bool = False) -> None:
    """Replace the text of a file atomically; mode, owner and label are kept.

    A link stays a link: its target is replaced. A file that is not regular is written to. With
    `before`, the file must still have that content.

    Raises:
        HostError: it cannot be written, or was changed in the meantime; it is unchanged.

    """
    try:
        with reach(path, makes_parents=makes_parents) as file:
            if file.status is None or stat.S_ISREG(file.status.st_mode):
                _exchange(file, before, after)
            else:
                _write_to(file, after)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        raise HostError(message, "run the command as its owner, or use another file") from error


def read_own(path: str, limit: int) -> bytes:
    """The first bytes of a file owned by root or by the owner of its directory.

    Raises:
        OSError: it cannot be opened.
        HostError: it is a link, not a regular file, or belongs to another user.

    """
    with reach(path, follows=False) as file:
        _require_own(file)
        return file.read(limit)


def rewrite_own(path: str, before: bytes, after: bytes) -> None:
    """Like `rewrite`, for a file that `read_own` has read.

    Raises:
        HostError: as in both of them.

    """
    try:
        with reach(path, follows=False) as file:
            _require_own(file)
            _exchange(file, before, after)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        raise HostError(message, "run the command as its owner, or use another file") from error


def _require_own(file: Reached) -> None:
    """Require that no other user placed or linked a file into a directory."""
    found, owner = file.status, os.fstat(file.directory).st_uid
    if found is None:
        return
    if not stat.S_ISREG(found.st_mode):
        why, remedy = "not a regular file", "replace it by a regular file"
    elif found.st_uid not in (0, owner):
        why = f"it is owned by user {found.st_uid}, its directory by user {owner}"
        remedy = f"chown {owner} {file.path}"
    elif found.st_nlink > 1:
        why = f"it has {found.st_nlink} names (hard links)"
        remedy = "replace it by a copy without hard links"
    else:
        return
    message = f"cannot use {file.path}: {why}"
    raise HostError(message, remedy)


def _write_to(file: Reached, after: bytes) -> None:
    """Write to a pipe or a device, which cannot be replaced."""
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
            message = f"{file.path} was changed by something else in the meantime"
            raise HostError(message, "check it, then run the command again")
        os.replace(temporary, file.name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(temporary, dir_fd=directory)
        raise
    os.fsync(directory)


def _keep(file: Reached, made: int) -> None:
    """Give the new file the owner, label and mode of the old one."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    old = os.open(file.name, flags, dir_fd=file.directory)
    try:
        take_over(old, made)
        os.fchmod(made, stat.S_IMODE(os.fstat(old).st_mode))
    finally:
        os.close(old)
