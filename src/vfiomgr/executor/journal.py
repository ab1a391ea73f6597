"""The journal: what a run is about to do, written and fsynced before it is done.

One file per run in /var/lib/vfiomgr/journal, one JSON record per line: `plan` with the intent and
all steps, then `begin`, `done`, `failed` and `stuck` of each step (`undo-…` while rolling back),
`more` with the steps that could be planned only then, and `end`. A run holds a lock on its file:
one without `end` and without a lock was cut off. A last line that is no whole record was never
written.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from errno import ENOSPC
from typing import TYPE_CHECKING, Any, Self, get_args

from vfiomgr.errors import InvalidDocument
from vfiomgr.host.tree import sync_directory
from vfiomgr.model.intent import ApplyLayout, InstallLayout, Intent
from vfiomgr.model.jsonable import to_jsonable
from vfiomgr.model.path import STATE
from vfiomgr.model.step import Step, subject

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.plan import Plan

DIRECTORY = STATE / "journal"
_SETTINGS = frozenset({"set-autoprobe", "set-heterogeneous", "set-reset-method"})
"""Steps that change what a later step of the same run restores."""
_INSTANCES = "set-gpu-instances"
_ABOUT_LAYOUTS = frozenset({"apply-layout", "revert-layout"})
_KEPT = 100
"""Runs to keep; older ones are removed."""
_TAIL = 4096
"""Bytes that hold the last record of an ended run."""


class Journal:
    """The record of one run, open for appending; a context manager."""

    def __init__(self, tree: HostTree, name: str, flags: int = 0) -> None:
        target = tree.locate(DIRECTORY / name)
        self.name = name
        self.descriptor = os.open(
            target, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600
        )
        self._is_torn = False
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)

    @classmethod
    def create(cls, tree: HostTree, plan: Plan, intent: Intent, boot_id: str | None) -> Self:
        """Begin the record of a run."""
        tree.make_directory(DIRECTORY)
        _prune(tree)
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        name = f"{moment}-{time.monotonic_ns():020}-{os.getpid()}.jsonl"
        journal = cls(tree, name, os.O_CREAT | os.O_EXCL)
        journal.record(
            "plan",
            {
                "summary": plan.summary,
                "boot_id": boot_id,
                "intent": to_jsonable(intent),
                **_contents(plan),
            },
        )
        sync_directory(os.path.dirname(tree.locate(DIRECTORY / name)))
        return journal

    @classmethod
    def resume(cls, tree: HostTree, name: str) -> Self:
        """Go on with the record of a run that was cut off, perhaps in the middle of a line."""
        journal = cls(tree, name)
        os.write(journal.descriptor, b"\n")
        return journal

    def record(
        self, event: str, details: Mapping[str, object] | None = None, *, durable: bool = True
    ) -> None:
        """Append one record; what is `durable` is on disk when this returns."""
        self._append([{"event": event, "time": time.time(), **(details or {})}], durable=durable)

    def extend(self, plan: Plan) -> None:
        """Record, durably, the steps that follow those so far."""
        self.record("more", _contents(plan))

    def begin(self, steps: Iterable[int]) -> None:
        """Record, durably, that steps are about to be taken."""
        now = time.time()
        records = [{"event": "begin", "time": now, "step": step} for step in steps]
        self._append(records, durable=True)

    def _append(self, records: Iterable[dict[str, object]], *, durable: bool) -> None:
        lines = "".join(json.dumps(record) + "\n" for record in records).encode()
        written = os.write(self.descriptor, (b"\n" if self._is_torn else b"") + lines)
        self._is_torn = written < len(lines)
        if self._is_torn:
            raise OSError(ENOSPC, os.strerror(ENOSPC), self.name)
        if durable:
            os.fsync(self.descriptor)

    def __enter__(self) -> Self:
        """Stay open for the run."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close; what is recorded is on disk already."""
        os.close(self.descriptor)


def _contents(plan: Plan) -> dict[str, object]:
    return {
        "locks": plan.locks,
        "steps": to_jsonable(plan.steps),
        "descriptions": [step.describe() for step in plan.steps],
        "subjects": [subject(step) for step in plan.steps],
    }


def read_journal(tree: HostTree, name: str) -> list[dict[str, Any]]:
    """The whole records of a journal; one that was cut off was never acted upon."""
    records: list[dict[str, Any]] = []
    for line in (tree.read_text(DIRECTORY / name) or "").splitlines():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


def _all_of(records: Iterable[Mapping[str, Any]], what: str) -> list[Any]:
    """What all plans of a run say, one after the other."""
    return [one for record in records for one in record.get(what, ())]


@dataclass(frozen=True, slots=True)
class CutOff:
    """A run that a crash, a stuck kernel or a failed roll-back left half done."""

    name: str
    summary: str
    step: str
    """What it was doing, or was about to begin with."""
    locks: frozenset[str]
    subjects: frozenset[str]
    """The functions and vGPUs that it was about."""
    is_of_this_boot: bool
    """A reboot undoes what a run did to devices, but not what it did to files."""
    has_settings: bool = False
    """Whether it alone knows how to restore a setting, such as autoprobe, that it had changed."""

    def is_settled_by(self, plan: Plan) -> bool:
        """Whether a later plan has brought all that this run was about to a state of its own."""
        covers = self.subjects <= set(plan.settles) and self.locks <= set(plan.locks)
        return covers and not self.has_settings


def _is_restored_later(steps: Sequence[dict[str, Any]], number: int) -> bool:
    """Whether a step changes what a later one of its run restores.

    GPU instances are put away around a run of sriov-manage, which would destroy them.
    """
    step, later = steps[number], steps[number + 1 :]
    if step["kind"] == _INSTANCES:
        alike = (other for other in later if other["kind"] == _INSTANCES)
        return any(other["after"] and other["device"] == step["device"] for other in alike)
    return step["kind"] in _SETTINGS


def cut_off_runs(tree: HostTree, boot_id: str | None) -> list[CutOff]:
    """The runs that left their work half done, and are not under way, in their order."""
    found: list[CutOff] = []
    for name in tree.children(DIRECTORY):
        # Who holds the lock comes first: a run that ends meanwhile has its end written.
        if _is_under_way(tree, name) or _is_settled(tree, name):
            continue
        records = read_journal(tree, name)
        if not records or records[0].get("event") != "plan":
            continue
        plan = records[0]
        steps = [record["step"] for record in records if "step" in record]
        step = _all_of(records, "descriptions")[steps[-1] if steps else 0]
        is_of_this_boot = plan["boot_id"] == boot_id
        planned = _all_of(records, "steps")
        has_settings = any(_is_restored_later(planned, number) for number in steps)
        found.append(
            CutOff(
                name,
                plan["summary"],
                step,
                frozenset(_all_of(records, "locks")),
                frozenset(filter(None, _all_of(records, "subjects"))),
                is_of_this_boot,
                has_settings=is_of_this_boot and has_settings,
            )
        )
    return found


@dataclass(frozen=True, slots=True)
class Unfinished:
    """What a journal that was cut off still holds: the wish, the steps, those that were begun."""

    intent: Intent
    steps: tuple[Step, ...]
    begun: tuple[int, ...]


def read_unfinished(tree: HostTree, name: str) -> Unfinished:
    """Read a run that was cut off, so that it can be ended.

    Raises:
        InvalidDocument: another version of vfiomgr wrote it, or it is damaged.

    """
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 - documents only

    from vfiomgr.model.step import Step  # noqa: PLC0415

    records = read_journal(tree, name)
    try:
        intent = _read_intent(records[0]["intent"])
        steps = TypeAdapter(tuple[Step, ...]).validate_python(_all_of(records, "steps"))
    except (ValidationError, KeyError) as error:
        message = f"{DIRECTORY / name} cannot be read by this vfiomgr: {error}"
        raise InvalidDocument(
            " ".join(message.split())[:300],
            "end it with the vfiomgr that wrote it, or look at the devices and remove the file",
        ) from None
    begun = [record["step"] for record in records if record["event"] == "begin"]
    undone = {record["step"] for record in records if record["event"] == "undo-done"}
    return Unfinished(intent, steps, tuple(step for step in begun if step not in undone))


def _read_intent(data: dict[str, Any]) -> Intent:
    """An intent as a journal holds it.

    Raises:
        ValidationError: it is none.
        KeyError: of a kind that this version does not know.

    """
    from pydantic import TypeAdapter  # noqa: PLC0415 - documents only

    # pydantic looks for the names of fields' types among those of this function.
    from vfiomgr.model.step import Step  # noqa: F401, PLC0415

    kinds = {kind.__dataclass_fields__["kind"].default: kind for kind in get_args(Intent)}
    kind = kinds[data["kind"]]
    if kind in (ApplyLayout, InstallLayout):
        from vfiomgr.model.layout import Layout  # noqa: F401, PLC0415 - slow to import
    intent: Intent = TypeAdapter(kind).validate_python(data)
    return intent


def runs_so_far(tree: HostTree) -> frozenset[tuple[str, int]]:
    """All journals and how long they are: another value once another run has done anything."""
    try:
        with os.scandir(tree.locate(DIRECTORY)) as entries:
            return frozenset((entry.name, entry.stat().st_size) for entry in entries)
    except FileNotFoundError:
        return frozenset()


def supersede(tree: HostTree, run: CutOff) -> None:
    """Close the journal of a run that was cut off, once a later run has settled its devices."""
    with Journal.resume(tree, run.name) as journal:
        journal.record("end", {"outcome": "superseded"})


def _is_settled(tree: HostTree, name: str) -> bool:
    """Whether a run ended, and left nothing to be done; its last record tells."""
    try:
        file = open(tree.locate(DIRECTORY / name), "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        return True  # another process has removed an old one
    with file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL))
        lines = file.read().split(b"\n")
    for line in reversed(lines):
        with suppress(ValueError):
            last = json.loads(line)
            return bool(last["event"] == "end" and last["outcome"] != "incomplete")
    return False


def _is_under_way(tree: HostTree, name: str) -> bool:
    try:
        file = open(tree.locate(DIRECTORY / name), "rb")  # noqa: SIM115 - closed below
    except FileNotFoundError:
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _prune(tree: HostTree) -> None:
    """Remove old runs; one that is not settled yet stays, and so do the last about layouts."""
    left = _KEPT
    for name in reversed(tree.children(DIRECTORY)[:-_KEPT]):
        if _is_under_way(tree, name):
            continue
        if _is_about_layout(tree, name) and left:
            left -= 1  # revert takes them back
        elif _is_settled(tree, name) or not read_journal(tree, name):
            tree.remove(DIRECTORY / name)


def _is_about_layout(tree: HostTree, name: str) -> bool:
    records = read_journal(tree, name)
    intent = records[0].get("intent") if records else None
    return isinstance(intent, dict) and intent.get("kind") in _ABOUT_LAYOUTS
