"""Files that users name: opened without trusting other users, and replaced atomically.

Root edits files in directories that others may write, where a link can lead to any file. Each
directory on the path is opened relative to the previous one, so nobody can replace one in between.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from errno import EISDIR, ELOOP

from vfiomgr.errors import HostError
from vfiomgr.host.durable import remove_leftovers, replacing, take_over
from vfiomgr.value import Value

_MOST_LINKS = 40
_LOOK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Reached(Value):
    """A name in an open directory; the file itself need not exist."""

    path: str
    """The name as given."""
    directory: int
    """A descriptor of the directory, for listing and syncing."""
    name: str
    status: os.stat_result | None
    """The status of the file; None if it does not exist yet."""

    def read(self, limit: int) -> bytes:
        """The first bytes of the file, which must be regular.

        Raises:
            OSError: it cannot be opened, or has become a link.
            HostError: it is not a regular file.
        """
        with open(os.open(self.name, _READ, dir_fd=self.directory), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                message = f"cannot read {self.path}: not a regular file"
                raise HostError(message, "use a regular file")
            return file.read(limit)


@contextmanager
def reach(path: str, *, follows: bool = True, makes_parents: bool = False) -> Iterator[Reached]:
    """Reach a file; `follows` says whether it may itself be a link.

    A link of a user other than root and the caller may only lead to that user's own files.

    Raises:
        OSError: a directory on the path is missing or not accessible.
        HostError: a link leads to a forbidden place.
    """
    with closing(_Walk(path, follows=follows, makes_parents=makes_parents)) as walk:
        yield walk.reached()


class _Link(Value):
    """A link of another user that was followed."""

    place: str
    owner: int


class _Walk:
    """One walk from the root to a file."""

    def __init__(self, path: str, *, follows: bool, makes_parents: bool) -> None:
        self._path = path
        self._follows = follows
        self._makes_parents = makes_parents
        self._left = os.path.join(os.getcwd(), path).split("/")[::-1]
        self._open = [os.open("/", _LOOK | os.O_DIRECTORY)]
        self._names: list[str] = []
        self._links = 0
        self._others: list[_Link] = []

    def close(self) -> None:
        """Close all directories."""
        while self._open:
            os.close(self._open.pop())

    def reached(self) -> Reached:
        """Walk the entire path."""
        while True:
            name = self._left.pop()
            is_last = not any(self._left)
            if name in ("", ".", ".."):
                if is_last and not self._left:
                    raise OSError(EISDIR, os.strerror(EISDIR), self._path)
                if name == ".." and self._names:
                    os.close(self._open.pop())
                    self._names.pop()
                continue
            child = self._child(name, is_last=is_last)
            status = None if child is None else os.fstat(child)
            if child is not None and status is not None and stat.S_ISLNK(status.st_mode):
                self._follow(name, child, status, is_last=is_last)
            elif is_last:
                return self._end(name, child, status)
            elif child is not None:
                self._open.append(child)
                self._names.append(name)

    def _child(self, name: str, *, is_last: bool) -> int | None:
        """A descriptor of the entry with a name; None if the last one does not exist."""
        try:
            return os.open(name, _LOOK, dir_fd=self._open[-1])
        except FileNotFoundError:
            if is_last:
                return None
            if not self._makes_parents:
                raise
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=self._open[-1])
        return os.open(name, _LOOK, dir_fd=self._open[-1])

    def _follow(self, name: str, link: int, status: os.stat_result, *, is_last: bool) -> None:
        try:
            target = os.readlink("", dir_fd=link)
        finally:
            os.close(link)
        place = "/" + "/".join((*self._names, name))
        if is_last and not self._follows:
            message = f"cannot use {self._path}: it is a symbolic link to {target}"
            meant = os.path.normpath(os.path.join(os.path.dirname(place), target))
            raise HostError(message, f"if this file is meant, name it directly: {meant}")
        self._links += 1
        if self._links > _MOST_LINKS:
            raise OSError(ELOOP, os.strerror(ELOOP), self._path)
        if status.st_uid not in (0, os.geteuid()):
            self._others.append(_Link(place, status.st_uid))
        if target.startswith("/"):
            while self._names:
                os.close(self._open.pop())
                self._names.pop()
        self._left += target.rstrip("/").split("/")[::-1]

    def _end(self, name: str, child: int | None, status: os.stat_result | None) -> Reached:
        if child is not None:
            os.close(child)
        directory = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._open[-1])
        self._open.append(directory)
        owners = {os.fstat(directory).st_uid, *([] if status is None else [status.st_uid])}
        for link in self._others:
            if owners != {link.owner}:
                place = "/" + "/".join((*self._names, name))
                message = (
                    f"cannot use {self._path}: {link.place} is a symbolic link of user "
                    f"{link.owner}, to a file of another user"
                )
                raise HostError(message, f"if that file is meant, name it directly: {place}")
        return Reached(self._path, directory, name, status)


_NEW_MODE = 0o666
"""The mode before the umask, as for any new file."""


def rewrite(
    path: str,
    before: bytes | None,
    after: bytes,
    *,
    makes_parents: bool = False,
    mode: int | None = None,
) -> None:
    """Replace the text of a file atomically; owner and label are kept, and its mode without `mode`.

    A link stays a link: its target is replaced. A file that is not regular is written to. With
    `before`, the file must still have that content.

    Raises:
        HostError: it cannot be written, or was changed in the meantime; it is unchanged.
    """
    try:
        with reach(path, makes_parents=makes_parents) as file:
            if file.status is None or stat.S_ISREG(file.status.st_mode):
                _exchange(file, before, after, mode)
            else:
                _write_to(file, after)
    except OSError as error:
        raise _unwritten(path, error) from error


def _unwritten(path: str, error: OSError) -> HostError:
    message = f"cannot write {path}: {error.strerror or error}"
    if isinstance(error, FileNotFoundError):
        directory = os.path.dirname(os.path.realpath(path))
        return HostError(message, f"create its directory: mkdir -p {shlex.quote(directory)}")
    return HostError(message, "run the command as its owner, or use another file")


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
        raise _unwritten(path, error) from error


def _require_own(file: Reached) -> None:
    """Require that no other user placed or linked a file into a directory."""
    found, owner = file.status, os.fstat(file.directory).st_uid
    if found is None:
        return
    if not stat.S_ISREG(found.st_mode):
        why, remedy = "not a regular file", "replace it by a regular file"
    elif found.st_uid not in (0, owner):
        why = f"it is owned by user {found.st_uid}, its directory by user {owner}"
        remedy = f"chown {owner} {shlex.quote(file.path)}"
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


def _exchange(file: Reached, before: bytes | None, after: bytes, mode: int | None = None) -> None:
    remove_leftovers(file.directory, file.name)
    first = _NEW_MODE if file.status is None else 0o600
    with replacing(file.directory, file.name, first) as made:
        made.write(after)
        if file.status is not None:
            _keep(file, made.fileno())
        if mode is not None:
            os.fchmod(made.fileno(), mode)
        if before is not None and file.read(len(before) + 1) != before:
            message = f"{file.path} was changed by something else in the meantime"
            raise HostError(message, "check it, then run the command again")


def _keep(file: Reached, made: int) -> None:
    """Give the new file the owner, label and mode of the old one."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    old = os.open(file.name, flags, dir_fd=file.directory)
    try:
        take_over(old, made)
        os.fchmod(made, stat.S_IMODE(os.fstat(old).st_mode))
    finally:
        os.close(old)
