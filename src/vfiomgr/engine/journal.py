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
    PLANS,
    all_of,
    decode,
    encode,
    foreign_names,
    is_plan,
    last_record,
    names,
    names_planned_steps,
    next_name,
    place_of,
)
from vfiomgr.engine.registry import step_kinds
from vfiomgr.errors import InvalidDocument
from vfiomgr.host.owners import MOST_BYTES, NotARecord, open_own, read_own
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import BinaryIO

    from vfiomgr.engine.plan import Checkpoint, Plan, Request
    from vfiomgr.host.tree import HostTree

_ABOUT_LAYOUTS = frozenset({"apply-layout", "revert-layout"})
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


class CutOff(Value):
    """A run that was interrupted by a crash, a stuck kernel or a failed rollback."""

    name: str
    summary: str
    step: str
    """The step that it was in, or was about to begin."""
    locks: frozenset[str]
    subjects: frozenset[str]
    """The functions and vGPUs that it concerned."""
    is_of_this_boot: bool
    """A reboot undoes the changes to devices, but not those to files."""
    boot_id: str | None = None
    settings: frozenset[int] = frozenset()
    """The steps that changed a setting, such as autoprobe, that only this run can restore."""
    is_settled: bool = False
    """Whether later runs have settled all steps, and only the `end` record is missing."""

    @property
    def has_settings(self) -> bool:
        """Whether only this run can restore a setting that it changed."""
        return bool(self.settings)


class Damaged(Value):
    """A journal that is not intact and cannot be read; it may hold the state of devices."""

    name: str
    why: str
    locks: frozenset[str] | None = None
    """None if the plan itself cannot be read: any device may be concerned."""
    subjects: frozenset[str] | None = None


class Survey(Value):
    """What earlier runs left behind."""

    cut_off: tuple[CutOff, ...]
    damaged: tuple[Damaged, ...]
    foreign: tuple[str, ...]
    """Other names in the journal's directory."""
    settled: tuple[CutOff, ...] = ()
    """Interrupted runs without open steps, whose end can be recorded."""


def survey(tree: HostTree, boot_id: str | None) -> Survey:
    """Examine all journals of runs that are neither running nor ended."""
    found = [run for name in names(tree) if (run := _left_by(tree, name, boot_id)) is not None]
    runs = [run for run in found if isinstance(run, CutOff)]
    runs.sort(key=lambda run: place_of(run.name, is_of_this_boot=run.is_of_this_boot))
    return Survey(
        tuple(run for run in runs if not run.is_settled),
        tuple(run for run in found if isinstance(run, Damaged)),
        tuple(foreign_names(tree)),
        tuple(run for run in runs if run.is_settled),
    )


def cut_off_runs(tree: HostTree, boot_id: str | None) -> list[CutOff]:
    """The interrupted runs that are not running, in their order."""
    return list(survey(tree, boot_id).cut_off)


def _left_by(tree: HostTree, name: str, boot_id: str | None) -> CutOff | Damaged | None:
    """What a run left behind; None if it ended, is running, or never began."""
    try:
        with os.fdopen(open_own(tree, DIRECTORY / name), "rb") as file:
            # Who holds the lock comes first: a run that ends meanwhile has its end written.
            if _is_locked(file) or _has_ended(file):
                return None
            file.seek(0)
            data = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return None  # another process has removed an old one
    except NotARecord as error:
        return Damaged(name, str(error))
    contents = decode(data)
    if contents.damage or len(data) > MOST_BYTES:
        return _damaged(name, contents.damage or "it is too large", contents.records)
    if not contents.records:
        return None
    return _cut_off(name, contents.records, boot_id, settled_in(tree, contents.records))


def _damaged(name: str, why: str, records: list[dict[str, Any]]) -> Damaged:
    """What a damaged journal still shows; nothing if its first plan or a later one is lost."""
    plans = [record for record in records if record["event"] in PLANS]
    has_first = bool(records) and records[0]["event"] == "plan"
    if not has_first or not all(map(is_plan, plans)) or not names_planned_steps(records):
        return Damaged(name, why)
    return Damaged(name, why, *_touched(plans))


def _touched(records: list[dict[str, Any]]) -> tuple[frozenset[str], frozenset[str]]:
    locks, subjects = all_of(records, "locks"), all_of(records, "subjects")
    return frozenset(locks), frozenset(filter(None, subjects))


def settled_in(tree: HostTree, records: Iterable[Mapping[str, Any]]) -> frozenset[int] | None:
    """The steps of a run that later runs have settled; None if none has recorded any.

    A later run records it before its own end, so that a kill between the two changes nothing.
    """
    found = [r["settled"] for r in records if r["event"] == "settled" and _is_done(tree, r["by"])]
    return frozenset(step for steps in found for step in steps) if found else None


def _is_done(tree: HostTree, name: str | None) -> bool:
    """Whether a run that settled another run has ended; a run without steps has no name."""
    if name is None:
        return True
    try:
        with os.fdopen(open_own(tree, DIRECTORY / name), "rb") as file:
            last = _last_of(file)
    except FileNotFoundError:
        return True  # only ended runs are removed
    except NotARecord:
        return False
    return last is not None and (last["event"], last.get("outcome")) == ("end", "done")


def settle(
    tree: HostTree,
    run: CutOff,
    steps: Iterable[int],
    by: str | None,
    on_wait: Callable[[str], None],
) -> None:
    """Record that the run `by`, or one without steps, settles steps of an interrupted run."""
    _add(tree, run, "settled", {"settled": sorted(steps), "by": by}, on_wait)


def _add(
    tree: HostTree,
    run: CutOff,
    event: str,
    details: Mapping[str, object],
    on_wait: Callable[[str], None],
) -> None:
    """Add a record to the journal of an interrupted run, unless it was ended in the meantime."""
    try:
        journal = Journal.resume(tree, run.name, on_wait)
    except FileNotFoundError:
        return  # only ended runs are removed
    with journal, os.fdopen(os.dup(journal.descriptor), "rb") as file:
        if not _has_ended(file):
            journal.record(event, details)


def _cut_off(
    name: str,
    records: list[dict[str, Any]],
    boot_id: str | None,
    settled: frozenset[int] | None,
) -> CutOff:
    plan = records[0]
    begun = [record["step"] for record in records if "step" in record]
    planned = all_of(records, "steps")
    descriptions = all_of(records, "descriptions")
    last = begun[-1] if begun else 0
    is_of_this_boot = plan["boot_id"] == boot_id
    has_lost_some = not is_of_this_boot and _may_have_lost_some(planned, begun)
    left = set(begun) - (settled or set())
    settings = {number for number in left if _is_restored_later(planned, number)}
    return CutOff(
        name,
        plan["summary"],
        descriptions[last] + (", or a later one" if has_lost_some else ""),
        *_touched(records),
        is_of_this_boot,
        plan["boot_id"],
        frozenset(settings if is_of_this_boot else ()),
        is_settled=settled is not None and not left,
    )


def _may_have_lost_some(steps: Sequence[dict[str, Any]], begun: Iterable[int]) -> bool:
    """Whether further steps may have begun, whose beginnings a power cut has lost."""
    if not FIRST_STEPS <= len(set(begun)) < len(steps):
        return False
    kinds = [step_kinds().get(step["kind"]) for step in steps]
    return not any(kind is not None and kind.outlasts_reboot for kind in kinds)


def _is_restored_later(steps: Sequence[dict[str, Any]], number: int) -> bool:
    """Whether a later step of the run restores what this step changes; True for unknown kinds."""
    kind = step_kinds().get(steps[number]["kind"])
    return kind is None or kind.is_restored_later(steps[number], steps[number + 1 :])


def runs_so_far(tree: HostTree) -> frozenset[tuple[str, int]]:
    """All journals and their sizes; the value changes with every run."""
    try:
        with os.scandir(tree.locate(DIRECTORY)) as entries:
            return frozenset(
                (entry.name, entry.stat(follow_symlinks=False).st_size) for entry in entries
            )
    except FileNotFoundError:
        return frozenset()


def supersede(tree: HostTree, run: CutOff, on_wait: Callable[[str], None]) -> None:
    """Close the journal of an interrupted run after a later run has settled its devices."""
    _add(tree, run, "end", {"outcome": "superseded"}, on_wait)


def _has_ended(file: BinaryIO) -> bool:
    """Whether a run ended and nothing remains to be done; its last record shows that."""
    last = _last_of(file)
    return last is not None and last["event"] == "end" and last.get("outcome") != "incomplete"


def _last_of(file: BinaryIO) -> dict[str, Any] | None:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _TAIL))
    return last_record(file.read(_TAIL))


def _is_locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _prune(tree: HostTree) -> None:
    """Remove old runs, except unsettled ones and the last ones about layouts.

    Unreadable journals are kept too, since somebody has to check them.
    """
    left = _KEPT
    for name in reversed(names(tree)[:-_KEPT]):
        try:
            with os.fdopen(open_own(tree, DIRECTORY / name), "rb") as file:
                if _is_locked(file):
                    continue
                is_settled = _has_ended(file)
            records = read_journal(tree, name)
        except (FileNotFoundError, NotARecord, InvalidDocument):
            continue
        if left and records and records[0]["request"].get("kind") in _ABOUT_LAYOUTS:
            left -= 1  # revert takes them back
        elif is_settled or not records:
            tree.remove(DIRECTORY / name)
