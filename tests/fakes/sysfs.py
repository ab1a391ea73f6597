"""Files and links below one root, laid out as sysfs does; and how the kernel reads numbers."""

from __future__ import annotations

import errno
import os
import re
import shutil
from typing import NoReturn

from vfiomgr.paths import HostPath

READ_ONLY, WRITE_ONLY, READ_WRITE = 0o444, 0o200, 0o644
UNASSIGNED = 0o1000
"""Marks an attribute that answers ENXIO, or the like, when it is read."""
_MOST = 1 << 16
"""Bytes of a file that are read at once."""
_DECIMAL = re.compile(r"([+-]?[0-9]+)\n?")
_UNSIGNED = re.compile(r"\+?(?:0[xX](?P<hex>[0-9a-fA-F]+)|0(?P<oct>[0-7]*)|(?P<dec>[1-9]\d*))\n?")


class Sysfs:
    """Makes and takes away what a kernel shows; it has no manners of its own."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.generation = 0
        """How often a link or a directory came or went: until then paths lead where they led."""

    def real(self, path: str) -> str:
        """Where a host's path lies on this machine, unresolved."""
        return self._root + path

    def put(self, path: str, text: str, mode: int = READ_WRITE) -> None:
        """An attribute: its text and a newline; write-only ones are empty."""
        self.put_bytes(path, b"" if mode == WRITE_ONLY else f"{text}\n".encode(), mode)

    def update(self, path: str, text: str, mode: int = READ_WRITE) -> None:
        """An attribute, written only where it says something else."""
        if not self.exists(path) or self.get(path) != text:
            self.put(path, text, mode)

    def put_bytes(self, path: str, data: bytes, mode: int = READ_WRITE) -> None:
        """A binary attribute, as it is."""
        real = self.real(path)
        try:
            self._write(real, data, mode)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(real), exist_ok=True)
            self._write(real, data, mode)

    @staticmethod
    def _write(real: str, data: bytes, mode: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            descriptor = os.open(real, flags, mode)
        except FileExistsError:
            os.unlink(real)  # a read-only file opens for nobody but root
            descriptor = os.open(real, flags, mode)
        try:
            if data:
                os.write(descriptor, data)
        finally:
            os.close(descriptor)

    def get(self, path: str) -> str:
        """The text of an attribute without newline; empty where there is none."""
        try:
            return read_file(self.real(path)).decode(errors="replace").rstrip("\n")
        except OSError:
            return ""

    def make(self, path: str) -> None:
        """A directory and its parents."""
        os.makedirs(self.real(path), exist_ok=True)

    def link(self, path: str, target: str) -> None:
        """A relative link that ends with the target's name, as all links of sysfs do."""
        self.link_absolute(path, _relative(target, path.rpartition("/")[0]))

    def link_absolute(self, path: str, target: str) -> None:
        """A link as /proc has them."""
        self.generation += 1
        real = self.real(path)
        try:
            os.symlink(target, real)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(real), exist_ok=True)
            os.symlink(target, real)

    def target(self, path: str) -> HostPath | None:
        """What a path leads to with all links followed; None where it leads nowhere."""
        try:
            descriptor = os.open(self.real(path), os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            real = os.readlink(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return HostPath(real.removeprefix(self._root))

    def target_name(self, path: str) -> str | None:
        """The last component of what a link points to; None where there is no link."""
        try:
            return os.readlink(self.real(path)).rpartition("/")[2]
        except OSError:
            return None

    def names(self, path: str) -> list[str]:
        """What a directory holds, sorted; empty where there is none."""
        try:
            return sorted(os.listdir(self.real(path)))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """Whether there is a file, directory or link."""
        return os.path.lexists(self.real(path))

    def drop(self, path: str) -> None:
        """Take away a file, a link or a whole directory; nothing where it is gone already."""
        self.generation += 1
        real = self.real(path)
        if os.path.isdir(real) and not os.path.islink(real):
            shutil.rmtree(real)
        elif os.path.lexists(real):
            os.unlink(real)

    def free_number(self, directory: str, prefix: str = "") -> int:
        """The lowest number that no entry of the directory has (ida_alloc)."""
        taken = set(self.names(directory))
        return next(n for n in range(len(taken) + 1) if f"{prefix}{n}" not in taken)

    def picture(self, *directories: str) -> dict[str, str]:
        """Each file's text, each link's target and each directory's being there, by path."""
        found: dict[str, str] = {}
        waiting = [self.real(directory) for directory in directories]
        while waiting:
            try:
                entries = os.scandir(waiting.pop())
            except OSError:
                continue
            with entries:
                for entry in entries:
                    found[entry.path.removeprefix(self._root)] = _shown(entry)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        return dict(sorted(found.items()))


def _relative(target: str, start: str) -> str:
    """A target as a link in the directory `start` names it; both are absolute, without `..`."""
    there, here = target.split("/"), start.split("/")
    common = 0
    while common < len(here) and common < len(there) - 1 and there[common] == here[common]:
        common += 1
    return "../" * (len(here) - common) + "/".join(there[common:])


def _shown(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return f"-> {os.readlink(entry.path)}"
    if entry.is_dir():
        return "/"
    return read_file(entry.path).decode("latin-1")


def read_file(real: str) -> bytes:
    """All bytes of a file of this machine; the files here are small, and there are thousands."""
    descriptor = os.open(real, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = data = os.read(descriptor, _MOST)
        while len(data) == _MOST:
            data = os.read(descriptor, _MOST)
            found += data
    finally:
        os.close(descriptor)
    return found


def reject(number: int) -> NoReturn:
    """Answer a system call with an errno."""
    raise OSError(number, os.strerror(number))


def unsigned(text: str, bits: int = 64) -> int:
    """A number as kstrtoul reads it: base by prefix, one final newline allowed.

    Raises:
        OSError: EINVAL for anything else, ERANGE for what does not fit.

    """
    match = _UNSIGNED.fullmatch(text)
    if match is None:
        reject(errno.EINVAL)
    number = _value(match)
    if number >> bits:
        reject(errno.ERANGE)
    return number


def _value(match: re.Match[str]) -> int:
    if match["hex"]:
        return int(match["hex"], 16)
    return int(match["dec"]) if match["dec"] else int(match["oct"] or "0", 8)


def decimal(text: str) -> int:
    """A number with its sign as kstrtol(…, 10, …) reads it, else EINVAL or ERANGE."""
    match = _DECIMAL.fullmatch(text)
    if match is None:
        reject(errno.EINVAL)
    number = int(match[1])
    if not -(1 << 63) <= number < 1 << 63:
        reject(errno.ERANGE)
    return number


def first_line(text: str) -> str:
    """A name as sysfs_streq compares it: one final newline does not count."""
    return text.removesuffix("\n")
