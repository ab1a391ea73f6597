"""The journal: what a run is about to do, written before it is done.

One file per run in /var/lib/vfiomgr/journal, numbered in the order of their start, one record per
line: `plan` with the request, its checkpoint and all steps, then `begin`, `done`, `failed` and
`stuck` of each step (`undo-…` while rolling back), `more` with steps that could not be planned
earlier, `settled` with steps that a later run has completed, and `end`. A run holds a lock on its
file: one without `end` and without a lock was interrupted.

Each record has the version of its layout, and ends with `"crc32"`: the checksum of its text without
that key. A last line without its newline was never written completely, so nobody acted on it; any
other damaged line was acted upon, and is lost. A record of another version counts as damaged too:
it may name devices in a way that this version does not know.

The plan is on disk before anything is done. The `begin` records of steps whose effect outlasts a
reboot, and of the first steps of a run, are also synced at once; later ones are synced together
(run.py). A run takes the next number while it locks the directory. The highest number is also kept
beside the directory, so that no number is used twice, even if somebody removes journals.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from errno import ENOSPC
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import msgspec

from vfiomgr.documents.jsonable import to_jsonable
from vfiomgr.engine.registry import request_kinds
from vfiomgr.errors import InvalidDocument
from vfiomgr.expressions import expression
from vfiomgr.host.owners import MOST_BYTES, NotARecord, open_own, read_own
from vfiomgr.paths import STATE
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.engine.plan import Checkpoint, Plan, Request
    from vfiomgr.host.tree import HostTree

VERSION = 1
"""The version of records that are written and read."""
_SUMMED = expression(rb'(\{.*), "crc32": "([0-9a-f]{8})"\}', re.DOTALL)
PLANS = frozenset({"plan", "more"})
"""Events whose records contain steps."""
_ABOUT_STEPS = frozenset({"begin", "undo-done"})
_LISTS = ("locks", "steps", "descriptions", "subjects")
_PER_STEP = _LISTS[1:]


class Contents(Value):
    """What a journal contains."""

    records: list[dict[str, Any]]
    """All intact records."""
    length: int
    """Bytes of complete lines; the rest was never written completely."""
    damage: str = ""
    """A description of the damage; empty if there is none."""


def _text(value: object) -> str:
    """A path as text, which is a `str` of its own."""
    if isinstance(value, str):
        return str(value)
    message = f"no record contains {value!r}"
    raise TypeError(message)


def encode(record: Mapping[str, object]) -> bytes:
    """One record as a line."""
    import zlib  # noqa: PLC0415 - a host without journals needs none

    try:
        text = msgspec.json.encode({**record, "version": VERSION}, enc_hook=_text)
    except UnicodeEncodeError:  # a name with bytes that are not UTF-8
        import json  # noqa: PLC0415 - as above

        text = json.dumps({**record, "version": VERSION}).encode()
    return b'%b, "crc32": "%08x"}\n' % (text[:-1], zlib.crc32(text))


def decode(data: bytes) -> Contents:
    """The records of a journal."""
    length = data.rfind(b"\n") + 1
    lines = [line for line in data[:length].split(b"\n") if line.strip()]
    records: list[dict[str, Any]] = []
    damage = ""
    for number, line in enumerate(lines, 1):
        try:
            records.append(_parse(line))
        except ValueError as error:
            damage = damage or f"record {number} {error}"
    return Contents(records, length, damage or _misshapen(records))


def last_record(tail: bytes) -> dict[str, Any] | None:
    """The last record of a journal, from its last bytes; None if it is damaged.

    It may be of another version: an end is one in all of them.
    """
    line = _last_line(tail)
    try:
        return _checked(line)
    except ValueError:
        return None


def is_end(record: Mapping[str, Any]) -> bool:
    """Whether nothing of a run remains to be done after this record."""
    return bool(record.get("event") == "end" and record.get("outcome") != "incomplete")


def _last_line(tail: bytes) -> bytes:
    lines = [line for line in tail[: tail.rfind(b"\n") + 1].split(b"\n") if line.strip()]
    return lines[-1] if lines else b""


def _parse(line: bytes) -> dict[str, Any]:
    """One record.

    Raises:
        ValueError: as in `_checked`, or it is of another version.
    """
    record = _checked(line)
    if (version := record.get("version")) != VERSION:
        message = f"is of version {version!r}; this vfiomgr reads version {VERSION}"
        raise ValueError(message)
    return record


def _checked(line: bytes) -> dict[str, Any]:
    """One record of any version.

    Raises:
        ValueError: its text was changed, or it is not a record.
    """
    import json  # noqa: PLC0415 - a host without journals needs none
    import zlib  # noqa: PLC0415 - a host without journals needs none

    found = _SUMMED.fullmatch(line)
    if found is None or zlib.crc32(found[1] + b"}") != int(found[2], 16):
        message = "does not match its checksum"
        raise ValueError(message)
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        record = None
    if not isinstance(record, dict) or not isinstance(record.get("event"), str):
        message = "is not a record of vfiomgr"
        raise ValueError(message)  # noqa: TRY004 - a wrong text, not a wrong argument
    return record


def _misshapen(records: Sequence[dict[str, Any]]) -> str:
    """Why intact records are not a journal; empty if they are."""
    for number, record in enumerate(records, 1):
        is_first = number == 1
        if is_first != (record["event"] == "plan"):
            return f"record {number} is {'not ' if is_first else ''}a plan"
        if record["event"] in PLANS and not is_plan(record):
            return f"record {number} is not a plan of vfiomgr"
    if records and not _is_head(records[0]):
        return "record 1 is not a plan of vfiomgr"
    return "" if names_planned_steps(records) else "a record is about a step that is not planned"


def names_planned_steps(records: Iterable[Mapping[str, Any]]) -> bool:
    """Whether each record refers to a step that was planned before; the plans are intact."""
    steps = 0
    for record in records:
        if record["event"] in PLANS:
            steps += len(record["steps"])
        elif record["event"] == "settled":
            numbers, by = record.get("settled"), record.get("by", 0)
            is_list = isinstance(numbers, list) and all(_is_number(n, steps) for n in numbers)
            if not is_list or not (by is None or (isinstance(by, str) and _is_ours(by))):
                return False
        elif ("step" in record or record["event"] in _ABOUT_STEPS) and not _is_number(
            record.get("step"), steps
        ):
            return False
    return True


def is_plan(record: Mapping[str, Any]) -> bool:
    """Whether a record has all fields of a plan."""
    if not all(isinstance(record.get(key), list) for key in _LISTS):
        return False
    described = {len(record[key]) for key in _PER_STEP}
    texts = (*record["locks"], *record["descriptions"], *filter(None, record["subjects"]))
    return (
        len(described) == 1
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(step, dict) and "kind" in step for step in record["steps"])
    )


def _is_head(plan: Mapping[str, Any]) -> bool:
    return (
        isinstance(plan.get("summary"), str)
        and isinstance(plan.get("boot_id"), str | None)
        and isinstance(plan.get("request"), dict)
        and "checkpoint" in plan
        and bool(plan["descriptions"])
    )


def _is_number(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < limit


def all_of(records: Iterable[Mapping[str, Any]], what: str) -> list[Any]:
    """The values of all plans of a run, concatenated."""
    return [one for record in records for one in record.get(what, ())]


DIRECTORY = STATE / "journal"
LAST = STATE / "journal.last"
"""The highest number used by a run."""
_NUMBERED = expression(r"([0-9]{12,18})\.jsonl")
_DIGITS = 18
_MOST_RUNS = 10**15
"""Numbers beyond this are invalid."""


def names(tree: HostTree) -> list[str]:
    """The names of all journals, the oldest first."""
    return sorted(filter(_is_ours, tree.children(DIRECTORY)), key=_number)


def _number(name: str) -> int:
    return int(name.partition(".")[0])


def foreign_names(tree: HostTree) -> list[str]:
    """Other names in the directory, which are not journals of vfiomgr."""
    return [name for name in tree.children(DIRECTORY) if not _is_ours(name)]


def _is_ours(name: str) -> bool:
    return _NUMBERED.fullmatch(name) is not None


@contextmanager
def next_name(tree: HostTree) -> Iterator[str]:
    """An unused name, while no other process can take one.

    Raises:
        OSError: the number cannot be stored.
    """
    with tree.directory(DIRECTORY) as directory:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            number = _next_number(tree)
            yield f"{number:012}.jsonl"
        finally:
            fcntl.flock(directory, fcntl.LOCK_UN)  # a child of another thread may hold it too


def _next_number(tree: HostTree) -> int:
    present = _highest(tree.children(DIRECTORY))
    is_new = not tree.exists(LAST)
    try:
        descriptor = tree.open(LAST, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
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
        with tree.directory(LAST.parent) as directory:
            os.fsync(directory)
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
    file = DIRECTORY / name
    return InvalidDocument(f"cannot read {file}: {why}", how_to_remove(file))


def how_to_remove(file: str) -> str:
    """The remedy for a record that cannot be read: it may describe the state of devices."""
    return f"check the devices, then move the file away: mv {file} /root/"


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
