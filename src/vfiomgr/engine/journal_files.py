"""The files of the journal: their names, which give the order, and other files in the directory.

A run takes the next number while it locks the directory. The highest number is also kept beside
the directory, so that no number is used twice, even if somebody removes journals.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vfiomgr.host.tree import sync_directory
from vfiomgr.paths import STATE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.host.tree import HostTree

DIRECTORY = STATE / "journal"
LAST = STATE / "journal.last"
"""The highest number used by a run."""
_NUMBERED = re.compile(r"([0-9]{12,18})\.jsonl")
_DATED = re.compile(r"[0-9]{8}T[0-9]{6}Z-([0-9]{20})-[0-9]+\.jsonl")
"""Names used by earlier versions: wall clock, monotonic clock, PID."""
_DIGITS = 18
_MOST_RUNS = 10**15
"""Numbers beyond this are invalid."""

Place = tuple[bool, int, str]


def place_of(name: str, *, is_of_this_boot: bool = False) -> Place:
    """The sort key for the order in which journals were begun.

    Journals named by the clock are older than numbered ones. Among them, the monotonic clock orders
    those of one boot, since the wall clock may have been changed.
    """
    numbered, dated = _NUMBERED.fullmatch(name), _DATED.fullmatch(name)
    if numbered is not None:
        return True, int(numbered[1]), name
    return False, int(dated[1]) if dated is not None and is_of_this_boot else 0, name


def names(tree: HostTree) -> list[str]:
    """The names of all journals, the oldest first."""
    found = filter(_is_ours, tree.children(DIRECTORY))
    return sorted(found, key=place_of)


def foreign_names(tree: HostTree) -> list[str]:
    """Other names in the directory, which are not journals of vfiomgr."""
    return [name for name in tree.children(DIRECTORY) if not _is_ours(name)]


def _is_ours(name: str) -> bool:
    return bool(_NUMBERED.fullmatch(name) or _DATED.fullmatch(name))


@contextmanager
def next_name(tree: HostTree) -> Iterator[str]:
    """An unused name, while no other process can take one.

    Raises:
        OSError: the number cannot be stored.

    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    descriptor = os.open(tree.locate(DIRECTORY), flags)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        number = _next_number(tree)
        yield f"{number:012}.jsonl"
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child of another thread may have it too
        os.close(descriptor)


def _next_number(tree: HostTree) -> int:
    present = _highest(tree.children(DIRECTORY))
    file = tree.locate(LAST)
    is_new = not os.path.lexists(file)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(file, flags, 0o600)
    except OSError as error:
        if is_new:
            raise
        _tell_unusable(error.strerror)
        return present + 1
    with os.fdopen(descriptor, "r+b", buffering=0) as kept:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            _tell_unusable("not a regular file")
            return present + 1
        number = max(present, _read(os.pread(descriptor, _DIGITS + 2, 0))) + 1
        kept.write(b"%0*d\n" % (_DIGITS, number))
        os.fsync(descriptor)
    if is_new:
        sync_directory(os.path.dirname(file))
    return number


def _tell_unusable(why: str | None) -> None:
    """Report an unusable number file; the names in the directory are sufficient in most cases."""
    warnings.warn(f"cannot use {LAST}: {why}", stacklevel=3)


def _highest(present: Iterable[str]) -> int:
    found = (_NUMBERED.fullmatch(name) for name in present)
    numbers = (int(match[1]) for match in found if match is not None)
    return max((number for number in numbers if number < _MOST_RUNS), default=0)


def _read(text: bytes) -> int:
    """The stored number; 0 if it is missing or invalid."""
    number = text.removesuffix(b"\n")
    if len(number) != _DIGITS or not number.isdigit() or int(number) >= _MOST_RUNS:
        return 0
    return int(number)
