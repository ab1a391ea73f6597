"""The journal: what a run is about to do, written before it is done.

One file per run in /var/lib/vfiomgr/journal, numbered in the order of their start, one record per
line (journal_files.py): `plan` with the request, its checkpoint and all steps, then `begin`,
`done`, `failed` and `stuck` of each step (`undo-…` while rolling back), `more` with steps that
could not be planned earlier, `settled` with steps that a later run has completed, and `end`. A run
holds a lock on its file: one without `end` and without a lock was interrupted. An incomplete last
line was never written.

The plan is on disk before anything is done. The `begin` records of steps whose effect outlasts a
reboot, and of the first steps of a run, are also synced at once; later ones are synced together
(run.py).
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from errno import ENOSPC
from typing import TYPE_CHECKING, Any, Self

from vfiomgr.documents.jsonable import to_jsonable
from vfiomgr.engine.journal_files import (
    DIRECTORY,
    decode,
    encode,
    is_end,
    last_record,
    names,
    next_name,
)
from vfiomgr.engine.registry import request_kinds
from vfiomgr.errors import InvalidDocument
from vfiomgr.host.owners import MOST_BYTES, NotARecord, open_own, read_own

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import BinaryIO

    from vfiomgr.engine.plan import Checkpoint, Plan, Request
    from vfiomgr.host.tree import HostTree

_KEPT = 100
"""Number of runs to keep; older ones are removed."""
FIRST_STEPS = 16
"""Steps whose beginnings are synced one by one; later ones are synced together, as many at once."""
_TAIL = 4096
"""Bytes that are sure to contain the last record of a finished run."""


class Journal:
    """The record of one run, open for appending; a context manager."""

    def __init__(
        self,
        tree: HostTree,
        name: str,
        flags: int = 0,
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.name = name
        self.descriptor = tree.open(DIRECTORY / name, os.O_RDWR | os.O_APPEND | flags)
        self._length = 0
        """Bytes of complete records; a failed write may have left more."""
        try:
            _lock(self.descriptor, name, on_wait)
        except BaseException:
            os.close(self.descriptor)
            raise

    @classmethod
    def create(
        cls,
        tree: HostTree,
        plan: Plan,
        request: Request,
        boot_id: str | None,
        checkpoint: Checkpoint | None = None,
    ) -> Self:
        """Begin the record of a run; if that fails, nothing of it remains."""
        tree.make_directory(DIRECTORY)
        _prune(tree)
        with next_name(tree) as name:
            journal = cls(tree, name, os.O_CREAT | os.O_EXCL)
        try:
            journal.record(
                "plan",
                {
                    "summary": plan.summary,
                    "boot_id": boot_id,
                    "request": to_jsonable(request),
                    "checkpoint": to_jsonable(checkpoint),
                    **_contents(plan),
                },
            )
            with tree.directory(DIRECTORY) as directory:
                os.fsync(directory)
        except BaseException:
            journal._discard(tree)
            raise
        return journal

    def _discard(self, tree: HostTree) -> None:
        """Remove a journal that is not used; if that fails, it is empty or incomplete."""
        with suppress(OSError), tree.directory(DIRECTORY) as directory:
            os.unlink(self.name, dir_fd=directory)
        os.close(self.descriptor)

    @classmethod
    def resume(
        cls, tree: HostTree, name: str, on_wait: Callable[[str], None] = lambda _: None
    ) -> Self:
        """Continue the record of an interrupted run, which may end in an incomplete line."""
        journal = cls(tree, name, on_wait=on_wait)
        try:
            journal._length = decode(_read_all(journal.descriptor)).length
        except BaseException:
            os.close(journal.descriptor)
            raise
        return journal

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open file."""
        return (self.descriptor,)

    def record(
        self, event: str, details: Mapping[str, object] | None = None, *, durable: bool = True
    ) -> None:
        """Append one record; with `durable`, it is on disk when this returns."""
        self._append([{"event": event, "time": time.time(), **(details or {})}], durable=durable)

    def extend(self, plan: Plan) -> None:
        """Record durably the steps that follow the previous ones."""
        self.record("more", _contents(plan))

    def begin(self, steps: Iterable[int], *, durable: bool = True) -> None:
        """Record that steps are about to begin."""
        now = time.time()
        records = [{"event": "begin", "time": now, "step": step} for step in steps]
        self._append(records, durable=durable)

    def _append(self, records: Iterable[dict[str, object]], *, durable: bool) -> None:
        lines = b"".join(map(encode, records))
        if os.fstat(self.descriptor).st_size != self._length:
            os.ftruncate(self.descriptor, self._length)  # what was written in part
        if os.write(self.descriptor, lines) < len(lines):
            raise OSError(ENOSPC, os.strerror(ENOSPC), self.name)
        self._length += len(lines)
        if durable:
            os.fsync(self.descriptor)

    def __enter__(self) -> Self:
        """Stay open for the run."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file; its records are already on disk."""
        os.close(self.descriptor)


def _lock(descriptor: int, name: str, on_wait: Callable[[str], None]) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait(f"waiting for another vfiomgr, which uses {DIRECTORY / name}")
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return file.read(MOST_BYTES)


def _contents(plan: Plan) -> dict[str, object]:
    return {
        "locks": plan.locks,
        "steps": to_jsonable(plan.steps),
        "descriptions": [step.describe() for step in plan.steps],
        "subjects": [step.subject for step in plan.steps],
    }


def read_journal(tree: HostTree, name: str) -> list[dict[str, Any]]:
    """The complete records of a journal; an incomplete one was never acted upon.

    Raises:
        InvalidDocument: the journal is damaged, or does not belong to vfiomgr.

    """
    try:
        contents = decode(read_own(tree, DIRECTORY / name))
    except FileNotFoundError:
        return []  # another process has removed an old one
    except NotARecord as error:
        raise unreadable(name, str(error)) from None
    if contents.damage:
        raise unreadable(name, contents.damage)
    return contents.records


def unreadable(name: str, why: str) -> InvalidDocument:
    """The error for a journal that cannot be used."""
    return InvalidDocument(
        f"cannot read {DIRECTORY / name}: {why}",
        f"check the devices, then move the file away: mv {DIRECTORY / name} /root/",
    )


def runs_so_far(tree: HostTree) -> frozenset[tuple[str, int]]:
    """All journals and their sizes; the value changes with every run."""
    try:
        with os.scandir(tree.locate(DIRECTORY)) as entries:
            return frozenset(
                (entry.name, entry.stat(follow_symlinks=False).st_size) for entry in entries
            )
    except FileNotFoundError:
        return frozenset()


def has_ended(file: BinaryIO) -> bool:
    """Whether a run ended and nothing remains to be done; its last record shows that."""
    last = last_of(file)
    return last is not None and is_end(last)


def last_of(file: BinaryIO) -> dict[str, Any] | None:
    """The last record of a journal; None if it is damaged."""
    return last_record(tail_of(file))


def tail_of(file: BinaryIO) -> bytes:
    """The end of a journal, with its last record."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL))
    return file.read(_TAIL)


def is_locked(file: BinaryIO) -> bool:
    """Whether a run holds the lock on its journal, which others only share from here on."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _prune(tree: HostTree) -> None:
    """Remove old runs, except unsettled ones and the last ones that other requests read.

    Unreadable journals are kept too, since somebody has to check them.
    """
    left = _KEPT
    for name in reversed(names(tree)[:-_KEPT]):
        try:
            with os.fdopen(open_own(tree, DIRECTORY / name), "rb") as file:
                if is_locked(file):
                    continue
                is_settled = has_ended(file)
            records = read_journal(tree, name)
        except (FileNotFoundError, NotARecord, InvalidDocument):
            continue
        if left and records and _is_kept_longer(records[0]["request"]):
            left -= 1
        elif is_settled or not records:
            tree.remove(DIRECTORY / name)


def _is_kept_longer(request: Mapping[str, Any]) -> bool:
    kind = request_kinds().get(str(request.get("kind")))
    return kind is not None and kind.has_long_journal
