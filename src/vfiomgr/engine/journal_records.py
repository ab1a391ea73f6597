"""The lines of a journal: one JSON record each, with a checksum.

A record ends with `"crc32"`: the checksum of its text without that key. Journals of earlier
versions have none. A last line without its newline was never written completely, so nobody acted
on it; any other damaged line was acted upon, and is lost.
"""

from __future__ import annotations

import json
import re
import zlib
from typing import TYPE_CHECKING, Any

from vfiomgr.engine.old_journals import current
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_SUMMED = re.compile(rb'(\{.*), "crc32": "([0-9a-f]{8})"\}', re.DOTALL)
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


def encode(record: Mapping[str, object]) -> bytes:
    """One record as a line."""
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
            records.append(_read(line, is_summed=is_summed))
        except ValueError as error:
            # Earlier versions completed a torn line with a newline and went on behind it.
            was_torn = not is_summed and number > 1 and isinstance(error, json.JSONDecodeError)
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


def _read(line: bytes, *, is_summed: bool) -> dict[str, Any]:
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
        JSONDecodeError: it is not JSON.
        ValueError: its text was changed, or it is not a record.

    """
    if is_summed:
        found = _SUMMED.fullmatch(line)
        if found is None or zlib.crc32(found[1] + b"}") != int(found[2], 16):
            message = "does not match its checksum"
            raise ValueError(message)
    try:
        record = json.loads(line)
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
