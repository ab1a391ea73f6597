"""The files of the journal: their names, which say their order, and who else is in the directory.

A run takes the next number while it locks the directory. The highest number so far is also kept
beside the directory, so that no number comes twice, even where somebody removes journals.
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
"""The highest number that a run had."""
_NUMBERED = re.compile(r"([0-9]{12,18})\.jsonl")
_DATED = re.compile(r"[0-9]{8}T[0-9]{6}Z-([0-9]{20})-[0-9]+\.jsonl")
"""Names that earlier versions gave: wall clock, monotonic clock, PID."""
_DIGITS = 18
_MOST_RUNS = 10**15
"""A number beyond this was not reached by counting."""

Place = tuple[bool, int, str]


def place_of(name: str, *, is_of_this_boot: bool = False) -> Place:
    """What sorts journals in the order in which they were begun.

    All that are named by the clock are older than those with a number. Among them the monotonic
    clock orders those of one boot, since somebody may have set the other one.
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
    """What else is in the directory: no run of vfiomgr has such a name."""
    return [name for name in tree.children(DIRECTORY) if not _is_ours(name)]


def _is_ours(name: str) -> bool:
    return bool(_NUMBERED.fullmatch(name) or _DATED.fullmatch(name))


@contextmanager
def next_name(tree: HostTree) -> Iterator[str]:
    """A name that no run had, while no other process can take one.

    Raises:
        OSError: the number cannot be kept.

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
    """The names in the directory are enough as long as nobody removes the last of them."""
    warnings.warn(f"cannot use {LAST}: {why}", stacklevel=3)


def _highest(present: Iterable[str]) -> int:
    found = (_NUMBERED.fullmatch(name) for name in present)
    numbers = (int(match[1]) for match in found if match is not None)
    return max((number for number in numbers if number < _MOST_RUNS), default=0)


def _read(text: bytes) -> int:
    """The number that is kept; 0 where there is none, or something else."""
    number = text.removesuffix(b"\n")
    if len(number) != _DIGITS or not number.isdigit() or int(number) >= _MOST_RUNS:
        return 0
    return int(number)
