"""Files that users name, exchanged whole: all of the new text or all of the old one."""

from __future__ import annotations

import os
import stat
from contextlib import suppress

from vfiomgr.errors import HostError
from vfiomgr.host.tree import sync_directory, take_over

_NEW_MODE = 0o666
"""Before the umask, as for any file that a program makes."""


def rewrite(path: str, before: bytes | None, after: bytes) -> None:
    """Put a text in the place of another, atomically; mode, owner and label are kept.

    A link stays a link: what it leads to is exchanged. What is no regular file is written to.
    With `before`, the file must still hold that.

    Raises:
        HostError: it cannot be written, or was changed meanwhile; it is as it was.

    """
    target = os.path.realpath(path)
    try:
        found = _status(target)
        if found is not None and not stat.S_ISREG(found.st_mode):
            with open(target, "wb") as file:
                file.write(after)
            return
        _exchange(target, found, before, after)
    except OSError as error:
        message = f"{path} cannot be written: {error.strerror or error}"
        raise HostError(message, "run as its owner, or name another file") from error


def _status(target: str) -> os.stat_result | None:
    try:
        return os.stat(target)
    except FileNotFoundError:
        return None


def _exchange(
    target: str, found: os.stat_result | None, before: bytes | None, after: bytes
) -> None:
    directory, name = os.path.split(target)
    temporary = os.path.join(directory, f".{name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        os.unlink(temporary)  # of a process of this number that was killed
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, _NEW_MODE if found is None else 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(after)
            file.flush()
            if found is not None:
                take_over(target, file.fileno())
                os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode))
            os.fsync(file.fileno())
        if before is not None:
            _require_unchanged(target, before)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
    sync_directory(directory)


def _require_unchanged(target: str, before: bytes) -> None:
    with open(target, "rb") as file:
        current = file.read()
    if current != before:
        message = f"{target} was changed meanwhile, and not by this command"
        raise HostError(message, "look at it, then run the command again")
