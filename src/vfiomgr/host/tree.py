"""A host's file tree below one root: the running host, a recorded one, or a simulated kernel."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import EBUSY, EINVAL, ENAMETOOLONG, ENOENT, ENOTDIR
from threading import get_ident

from vfiomgr.errors import HostError, WriteFailed
from vfiomgr.host.durable import remove_leftovers, replace_file
from vfiomgr.host.inside import MOST_LINKS, Inside
from vfiomgr.host.owners import NodeAccess
from vfiomgr.host.programs import Programs
from vfiomgr.paths import RUNTIME, STATE, HostPath

_MOST_OPEN = 32
"""Files that wait to be closed together; a process may have 1,024 open (systemd's default)."""


class Closer:
    """Closes descriptors at once, or within `together` several at a time.

    Each thread closes only its own.
    """

    def __init__(self) -> None:
        self._unclosed: dict[int, list[int]] = {}

    def close(self, descriptor: int) -> None:
        """Close a descriptor, now or later."""
        unclosed = self._unclosed.get(get_ident())
        if unclosed is None:
            os.close(descriptor)
            return
        unclosed.append(descriptor)
        if len(unclosed) >= _MOST_OPEN:
            _close_all(unclosed)
            unclosed.clear()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let the descriptors of this thread wait for each other; all are closed at the end."""
        thread = get_ident()
        if thread in self._unclosed:
            yield
            return
        unclosed = self._unclosed[thread] = list[int]()
        try:
            yield
        finally:
            del self._unclosed[thread]
            _close_all(unclosed)


def _close_all(descriptors: Iterable[int]) -> None:
    """Close files; those with consecutive descriptors by one close_range(2).

    A range is never empty: os.closerange(0, 0) would close every file of the process.
    """
    runs: list[tuple[int, int]] = []
    for descriptor in sorted(descriptors):
        is_next = bool(runs) and runs[-1][1] == descriptor
        runs.append((runs.pop()[0] if is_next else descriptor, descriptor + 1))
    for start, end in runs:
        os.closerange(start, end)


_OWN = (f"{STATE}/", f"{RUNTIME}/")
"""Directories that only vfiomgr writes to."""
_READ_LIMIT = 4096
"""An attribute fits in a page (fs/sysfs/file.c)."""
_MOST_BYTES = 64 << 20
"""Larger than any file that is read entirely; pci.ids and dpkg's status have a few MiB."""
_PERMISSIONS = 0o7777


class HostTree(Programs):
    """Reads and writes the files of one host; every path stays below `root`.

    Files that are absent, or not readable for the kernel or this user, read as None.
    """

    reads_alone = False
    """Whether one process reads all of it. Agents set this, to leave processors to guests."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.path.realpath(root)
        self._prefix = "" if self.root == "/" else self.root
        self._inside = Inside(self._prefix)
        self._reading = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        if self._prefix:
            self._reading |= os.O_NOFOLLOW
        self.closer = Closer()

    @property
    def is_live(self) -> bool:
        """Whether a kernel acts on writes here: /sys is mounted, not recorded."""
        return os.path.ismount(f"{self._prefix}/sys")

    @property
    def runs_programs(self) -> bool:
        """Whether programs of this host can be run: only the machine's own can."""
        return self.is_machine

    @property
    def is_machine(self) -> bool:
        """Whether it is the root of the machine that runs vfiomgr, where programs take effect."""
        return self.root == "/"

    @property
    def can_hang(self) -> bool:
        """Whether a read or write may never return, which only a kernel can cause."""
        return self.is_live

    def forget(self) -> None:
        """Resolve the links of another root than `/` again: they may have changed."""
        self._inside.forget()

    def locate(self, path: HostPath) -> str:
        """The path on this machine; its last component may be a link.

        With another root than `/`, links in the directory part are resolved inside the root.

        Raises:
            OSError: the links form a loop, or lead through something other than a directory.
        """
        if not self._prefix:
            return path
        directory, _, name = path.rpartition("/")
        return f"{self._prefix}{self._inside.directory(directory)}/{name}"

    def _real(self, path: HostPath) -> str:
        """The path on this machine without any link."""
        if not self._prefix:
            return os.path.realpath(path)
        return self._prefix + self._inside.real(path)

    def _open(self, path: HostPath) -> int:
        """Open a file for reading; in a foreign tree only regular files.

        Opening a device can start it, and a FIFO would keep the reader waiting.

        Raises:
            OSError: it does not exist, or this user may not read it.
        """
        above, _, name = path.rpartition("/")
        return self._open_in(above, name)

    def _open_in(self, above: str, name: str) -> int:
        """Open a file of a directory, as `_open` does."""
        place = self._inside.listed_file(above, name) if self._prefix else f"{above}/{name}"
        if place is None:
            place = f"{self._prefix}{self._inside.directory(above)}/{name}"
            mode = os.lstat(place).st_mode
            path = HostPath(f"{above}/{name}")
            if stat.S_ISLNK(mode):
                place = self._real(path)
                mode = os.lstat(place).st_mode
            self._require_readable(mode, path)
        return os.open(place, self._reading)

    def _require_readable(self, mode: int, path: HostPath) -> None:
        """Refuse files of a foreign tree that are not to be read.

        Raises:
            OSError: it is not a regular file.
        """
        _require_regular(mode, path)

    def read_bytes(self, path: HostPath, limit: int = _READ_LIMIT) -> bytes | None:
        """The first bytes of a file."""
        above, _, name = path.rpartition("/")
        return self.read_bytes_in(above, name, limit)

    def read_bytes_in(self, above: str, name: str, limit: int = _READ_LIMIT) -> bytes | None:
        """The first bytes of a file of a directory; its path is not put together."""
        try:
            descriptor = self._open_in(above, name)
        except (OSError, ValueError):  # a name that no file can have
            return None
        try:
            return os.read(descriptor, limit)
        except OSError:
            return None
        finally:
            self.closer.close(descriptor)

    def read(self, path: HostPath) -> str | None:
        """The text of an attribute without its trailing newline."""
        above, _, name = path.rpartition("/")
        return self.read_in(above, name)

    def read_in(self, above: str, name: str) -> str | None:
        """The text of an attribute of a directory, as `read` returns it."""
        data = self.read_bytes_in(above, name)
        return None if data is None else data.decode(errors="replace").rstrip("\n")

    def read_number(self, path: HostPath) -> int | None:
        """An attribute that is a decimal number; None if it is not one."""
        text = (self.read(path) or "").strip()
        return int(text) if text.isdecimal() else None

    def read_whole(self, path: HostPath) -> bytes | None:
        """All bytes of a regular file.

        Raises:
            HostError: it is larger than any file that vfiomgr should read.
        """
        try:
            with open(self._open(path), "rb") as file:
                status = os.fstat(file.fileno())
                _require_regular(status.st_mode, path)
                # What the kernel makes as it is read has no size, e.g. /proc/PID/maps.
                limit = _MOST_BYTES + 1 if self._prefix or status.st_size else -1
                data = file.read(limit)
        except (OSError, ValueError):
            return None
        if limit > 0 and len(data) == limit:
            message = f"cannot read {path}: it is larger than {_MOST_BYTES >> 20} MiB"
            raise HostError(message, "check whether it is the right file; replace or remove it")
        return data

    def read_part(self, path: HostPath, start: int, length: int) -> bytes:
        """Bytes of a file from an offset on; fewer or none if it ends or is not readable."""
        try:
            descriptor = self._open(path)
        except (OSError, ValueError):
            return b""
        try:
            return os.pread(descriptor, length, start)
        except OSError:
            return b""
        finally:
            os.close(descriptor)

    def read_text(self, path: HostPath, limit: int = -1) -> str | None:
        """The text of a file, or its first `limit` characters; line ends are kept.

        Raises:
            HostError: without a limit, it is larger than any file that vfiomgr should read.
        """
        if limit < 0:
            data = self.read_whole(path)
            return None if data is None else data.decode(errors="replace")
        try:
            with open(self._open(path), encoding="utf-8", errors="replace", newline="") as file:
                return file.read(limit)
        except (OSError, ValueError):
            return None

    def link(self, path: HostPath) -> str | None:
        """The target of a symbolic link, as written."""
        try:
            return self._inside.target(path) if self._prefix else os.readlink(path)
        except (OSError, ValueError):
            return None

    def link_name(self, path: HostPath) -> str | None:
        """The last component of a symbolic link's target: a driver, a group, a device."""
        name = (self.link(path) or "").rstrip("/").rpartition("/")[2]
        return None if name in ("", ".", "..") else name

    def followed(self, path: HostPath) -> HostPath:
        """The path with the links of the file itself resolved, but not those of its directories."""
        for _ in range(MOST_LINKS):
            target = self.link(path)
            if target is None:
                break
            path = HostPath(target if target.startswith("/") else f"{path.parent}/{target}")
        return path

    def resolve(self, path: HostPath) -> HostPath | None:
        """The path with every link resolved, as a path of this host."""
        try:
            real = self._real(path)
        except (OSError, ValueError):
            return None
        return HostPath(real[len(self._prefix) :]) if os.path.exists(real) else None

    def status(self, path: HostPath) -> os.stat_result | None:
        """Owner, mode and kind of a file; for a link, its own."""
        try:
            return os.lstat(self.locate(path))
        except (OSError, ValueError):
            return None

    def children(self, path: HostPath) -> list[str]:
        """The names in a directory, sorted; empty if it is absent or not readable."""
        return sorted(self.entries(path))

    def entries(self, path: HostPath) -> list[str]:
        """The names in a directory in any order, as `children` returns them."""
        try:
            return self._inside.names(path) if self._prefix else os.listdir(path)
        except (OSError, ValueError):
            return []

    def why_unlisted(self, path: HostPath) -> str | None:
        """Why `children` cannot list a directory; None if it can."""
        try:
            os.listdir(self.locate(path / ""))
        except OSError as error:
            return error.strerror
        return None

    def device_number(self, path: HostPath) -> tuple[int, int] | None:
        """Major and minor number of a device node."""
        try:
            number = os.stat(self._real(path)).st_rdev
        except (OSError, ValueError):
            return None
        return (os.major(number), os.minor(number)) if number else None

    def is_claimed(self, path: HostPath, number: str) -> bool | None:
        """Whether a block device, major:minor, is exclusively claimed; None if unknown.

        Only nodes of this machine are opened: those of another tree may be any device.
        """
        if not self.is_machine:
            return None
        major, _, minor = number.partition(":")
        try:
            found, wanted = os.stat(path), os.makedev(int(major), int(minor))
            if not stat.S_ISBLK(found.st_mode) or found.st_rdev != wanted:
                return None
            flags = os.O_RDONLY | os.O_EXCL | os.O_NONBLOCK | os.O_CLOEXEC
            os.close(os.open(path, flags))
        except OSError as error:
            return True if error.errno == EBUSY else None
        return False

    def device_of(self, path: HostPath) -> str | None:
        """The kind and number of the device that a process of this machine has open: `b259:0`.

        A descriptor below /proc leads to the node itself, whatever its name and place.
        """
        if not self.is_machine:
            return None
        try:
            found = os.stat(path)
        except OSError:
            return None
        kind = "b" if stat.S_ISBLK(found.st_mode) else "c" if stat.S_ISCHR(found.st_mode) else None
        return kind and f"{kind}{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"

    def exists(self, path: HostPath) -> bool:
        """Whether there is a file, directory or link."""
        try:
            return os.path.lexists(self.locate(path))
        except OSError:
            return False

    def modified(self, path: HostPath) -> int | None:
        """The modification time of a file or directory, in nanoseconds of the host's clock."""
        try:
            return os.stat(self._real(path)).st_mtime_ns
        except (OSError, ValueError):
            return None

    @contextmanager
    def directory(self, path: str) -> Iterator[int]:
        """A descriptor of a directory, to open and change its files.

        With a root other than `/`, the directory is inside the root, even if a part of the path is
        replaced by a link in the meantime.

        Raises:
            OSError: it does not exist, or is not accessible.
        """
        if self._prefix:
            descriptor = self._inside.open_directory(path)
        else:
            descriptor = os.open(path or "/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def open(self, path: HostPath, flags: int, mode: int = 0o600) -> int:
        """Open a file in its directory; a link is refused.

        Raises:
            OSError: it does not exist, is a link, or is not accessible.
        """
        above, _, name = path.rpartition("/")
        with self.directory(above) as directory:
            return os.open(name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode, dir_fd=directory)

    def write(self, path: HostPath, text: str) -> None:
        """Write one attribute with a single write, as the kernel requires.

        The empty text is written as a newline: a write of no bytes reaches no kernel
        (drivers/base/bus.c, driver_set_override).

        Raises:
            WriteFailed: with the errno of the open or of the write.
        """
        try:
            descriptor = self.open(path, os.O_WRONLY)
            try:
                os.write(descriptor, (text or "\n").encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            raise write_failed(path, text, error.errno or 0) from error

    def replace(
        self, path: HostPath, data: bytes, mode: int = 0o644, *, durable: bool = True
    ) -> None:
        """Replace a file atomically: temporary file, fsync, rename, fsync of the directory.

        Owner and label of an existing file are kept. A file that is useless after a reboot need not
        be `durable`, which avoids the fsync.
        """
        with self.directory(path.parent) as directory:
            remove_leftovers(directory, None if path.startswith(_OWN) else path.name)
            replace_file(directory, path.name, data, mode, durable=durable)

    def remove(self, path: HostPath) -> None:
        """Remove a file durably; no error if it does not exist."""
        try:
            with self.directory(path.parent) as directory:
                remove_leftovers(directory, None if path.startswith(_OWN) else path.name)
                os.unlink(path.name, dir_fd=directory)
                os.fsync(directory)
        except OSError as error:
            if error.errno not in (ENOENT, ENOTDIR, ENAMETOOLONG):
                raise

    def remove_leftovers(self, path: HostPath) -> None:
        """Remove the temporary files that killed runs left of a file."""
        with suppress(FileNotFoundError), self.directory(path.parent) as directory:
            remove_leftovers(directory, path.name)

    def remove_empty_directory(self, path: HostPath) -> None:
        """Remove a directory if it is empty and can be removed."""
        with suppress(OSError), self.directory(path.parent) as directory:
            os.rmdir(path.name, dir_fd=directory)
        self._inside.forget()

    def make_directory(self, path: HostPath, mode: int = 0o755) -> None:
        """Create a directory of vfiomgr, with its parents; only root may write to it."""
        found = self.status(path)
        if found is not None and stat.S_ISDIR(found.st_mode):
            return
        os.close(self._inside.open_directory(path, makes=mode))
        self._inside.forget()

    def access(self, path: HostPath) -> NodeAccess | None:
        """Owner, group and mode of a node; None if it is absent."""
        try:
            found = os.lstat(self.locate(path))
        except (OSError, ValueError):
            return None
        return NodeAccess(found.st_uid, found.st_gid, found.st_mode & _PERMISSIONS)

    def change_access(self, path: HostPath, access: NodeAccess) -> None:
        """Set owner, group and mode of a node; no error if it is gone.

        Raises:
            HostError: this process may not do that.
        """
        try:
            descriptor = self.open(path, os.O_PATH)
        except FileNotFoundError:
            return
        try:
            os.chown(f"/proc/self/fd/{descriptor}", access.uid, access.gid)
            os.chmod(f"/proc/self/fd/{descriptor}", access.mode)
        except OSError as error:
            message = f"cannot change the access of {path} to {access}: {error.strerror}"
            raise HostError(message, "run as root; in a container, with CAP_CHOWN") from error
        finally:
            os.close(descriptor)


def _require_regular(mode: int, path: HostPath) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(EINVAL, "not a regular file", path)


def write_failed(path: HostPath, text: str, number: int) -> WriteFailed:
    """The error of a write; callers that know its purpose add cause and remedy."""
    shown = text or "\\n"
    return WriteFailed(
        path, text, number, f"cannot write {shown!r} to {path}: {os.strerror(number)}"
    )
