"""The files of the journal and their lines, also those of earlier versions.

Journals of earlier versions had an `intent` instead of the request, which also contained the fields
of its checkpoint.

A record ends with `"crc32"`: the checksum of its text without that key. Journals of earlier
versions have none. A last line without its newline was never written completely, so nobody acted
on it; any other damaged line was acted upon, and is lost.

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
from typing import TYPE_CHECKING, Any

import msgspec

from vfiomgr.expressions import expression
from vfiomgr.paths import STATE
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from vfiomgr.host.tree import HostTree


_KINDS = {
    "divide-gpu": "set-mig-instances",
    "forget-origin": "drop-original-state",
    "remember-origin": "save-original-state",
}
_FIELDS = {"install-layout": {"wish": "apply"}, "write-cdi": {"wish": "offer"}}
_CHECKPOINTS = {
    "apply-layout": {"begun": "begun", "before": "functions"},
    "change-quotas": {"priority_after": "priority"},
    "create-vgpu": {"places": "places"},
    "reset": {"methods_after": "methods"},
    "restore-vgpus": {"begun": "missing"},
    "set-gpu-mode": {"functions_after": "functions"},
    "set-virtual-functions": {
        "autoprobe_after": "autoprobe",
        "heterogeneous_after": "heterogeneous",
        "instances_after": "instances",
        "priority_after": "priority",
    },
    "start-vgpu": {"begun": "missing"},
    "switch-gpu": {
        "vgpus": "vgpus",
        "autoprobe_after": "autoprobe",
        "instances_after": "instances",
    },
}
"""For each kind of request, the fields that are now in the checkpoint, with their names there."""


def current(record: dict[str, Any]) -> dict[str, Any]:
    """A record of a journal, or a saved plan, with the names of this version."""
    record = dict(record)
    if isinstance(request := record.pop("intent", None), dict):
        record["request"] = _renamed(request)
        record["checkpoint"] = _checkpoint(request)
    elif isinstance(request := record.get("request"), dict):
        names = _FIELDS.get(str(request.get("kind")), {})
        record["request"] = {names.get(name, name): value for name, value in request.items()}
    if isinstance(steps := record.get("steps"), list):
        record["steps"] = [_renamed(step) for step in steps]
    return record


def _renamed(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """A step or request, including nested ones, with the present names and without a checkpoint."""
    if isinstance(value, list):
        return [_renamed(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("kind")
    if not isinstance(kind, str):
        return {name: _renamed(item) for name, item in value.items()}
    names, moved = _FIELDS.get(kind, {}), _CHECKPOINTS.get(kind, {})
    renamed = {names.get(n, n): _renamed(item) for n, item in value.items() if n not in moved}
    return {**renamed, "kind": _KINDS.get(kind, kind)}


def _checkpoint(request: dict[str, Any]) -> dict[str, Any] | None:
    """The checkpoint contained in an old request; None if requests of its kind have none."""
    names = _CHECKPOINTS.get(str(request.get("kind")), {})
    return {names[name]: request[name] for name in names if name in request} if names else None


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


class _NotJsonError(ValueError):
    """A record is not JSON, perhaps because its line was torn."""


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
        text = msgspec.json.encode(record, enc_hook=_text)
    except UnicodeEncodeError:  # a name with bytes that are not UTF-8
        import json  # noqa: PLC0415 - as above

        text = json.dumps(record).encode()
    return b'%b, "crc32": "%08x"}\n' % (text[:-1], zlib.crc32(text))


def decode(data: bytes) -> Contents:
    """The records of a journal."""
    length = data.rfind(b"\n") + 1
    lines = [line for line in data[:length].split(b"\n") if line.strip()]
    is_summed = bool(lines) and _SUMMED.fullmatch(lines[0]) is not None
    records: list[dict[str, Any]] = []
    damage = ""
    for number, line in enumerate(lines, 1):
        try:
            records.append(_read_line(line, is_summed=is_summed))
        except ValueError as error:
            # Earlier versions completed a torn line with a newline and went on behind it.
            was_torn = not is_summed and number > 1 and isinstance(error, _NotJsonError)
            damage = damage or ("" if was_torn else f"record {number} {error}")
    return Contents(records, length, damage or _misshapen(records))


def last_record(tail: bytes) -> dict[str, Any] | None:
    """The last record of a journal, from its last bytes; None if it is damaged."""
    lines = [line for line in tail[: tail.rfind(b"\n") + 1].split(b"\n") if line.strip()]
    if not lines:
        return None
    try:
        return _parse(lines[-1], is_summed=b'"crc32"' in lines[-1])
    except ValueError:
        return None


def _read_line(line: bytes, *, is_summed: bool) -> dict[str, Any]:
    """One record, with the names of this version.

    Raises:
        ValueError: as in `_parse`, or it is nested too deeply.

    """
    try:
        return current(_parse(line, is_summed=is_summed))
    except RecursionError:
        message = "is nested too deeply"
        raise ValueError(message) from None


def _parse(line: bytes, *, is_summed: bool) -> dict[str, Any]:
    """One record.

    Raises:
        _NotJsonError: it is not JSON.
        ValueError: its text was changed, or it is not a record.

    """
    import json  # noqa: PLC0415 - a host without journals needs none
    import zlib  # noqa: PLC0415 - a host without journals needs none

    if is_summed:
        found = _SUMMED.fullmatch(line)
        if found is None or zlib.crc32(found[1] + b"}") != int(found[2], 16):
            message = "does not match its checksum"
            raise ValueError(message)
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise _NotJsonError(*error.args) from error
    except RecursionError:
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
_DATED = expression(r"[0-9]{8}T[0-9]{6}Z-([0-9]{20})-[0-9]+\.jsonl")
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
