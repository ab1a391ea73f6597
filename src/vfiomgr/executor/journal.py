"""The journal: what a run is about to do, written and fsynced before it is done.

One file per run in /var/lib/vfiomgr/journal, one JSON record per line: `plan` with all steps,
then `begin`, `done` and `failed` of each step (`undo-…` while rolling back), and `end`. A run holds
a lock on its file: one without `end` and without a lock was cut off. A last line that is no whole
record was never written.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from vfiomgr.host.tree import sync_directory
from vfiomgr.model.path import STATE
from vfiomgr.model.snapshot import to_jsonable

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.plan import Plan

DIRECTORY = STATE / "journal"
_KEPT = 100
"""Runs to keep; older ones are removed."""


class Journal:
    """The record of one run, open for appending; a context manager."""

    def __init__(self, tree: HostTree, plan: Plan, boot_id: str | None) -> None:
        tree.make_directory(DIRECTORY)
        _prune(tree)
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
        self.name = f"{moment}-{os.getpid()}-{time.monotonic_ns()}.jsonl"
        target = tree.locate(DIRECTORY / self.name)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(target, flags, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        self.record(
            "plan",
            summary=plan.summary,
            boot_id=boot_id,
            locks=plan.locks,
            steps=to_jsonable(plan.steps),
            descriptions=[step.describe() for step in plan.steps],
        )
        sync_directory(os.path.dirname(target))

    def record(self, event: str, **details: object) -> None:
        """Append one record and make it durable."""
        line = json.dumps({"event": event, "time": time.time(), **details}) + "\n"
        os.write(self._descriptor, line.encode())
        os.fsync(self._descriptor)

    def __enter__(self) -> Self:
        """Stay open for the run."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close; what is recorded is on disk already."""
        os.close(self._descriptor)


def read_journal(tree: HostTree, name: str) -> list[dict[str, Any]]:
    """The whole records of a journal; one that was cut off was never acted upon."""
    records: list[dict[str, Any]] = []
    for line in (tree.read_text(DIRECTORY / name) or "").splitlines():
        with suppress(ValueError):
            records.append(json.loads(line))
    return records


@dataclass(frozen=True, slots=True)
class CutOff:
    """A run of this boot that a crash, or a failed roll-back, left half done.

    A reboot undoes what a run did to devices.
    """

    name: str
    summary: str
    step: str
    """What it was doing, or was about to begin with."""
    locks: frozenset[str]


def cut_off_runs(tree: HostTree, boot_id: str | None) -> list[CutOff]:
    """The runs of this boot that left their work half done, and are not under way."""
    found: list[CutOff] = []
    for name in tree.children(DIRECTORY):
        if _is_under_way(tree, name):  # first: a run that ends meanwhile has its end written
            continue
        records = read_journal(tree, name)
        if not records or _is_settled(records) or records[0].get("boot_id") != boot_id:
            continue
        plan = records[0]
        steps = [record["step"] for record in records if "step" in record]
        step = plan["descriptions"][steps[-1] if steps else 0]
        found.append(CutOff(name, plan["summary"], step, frozenset(plan["locks"])))
    return found


def supersede(tree: HostTree, run: CutOff) -> None:
    """Close the journal of a run that was cut off, once a later run has settled its devices."""
    line = "\n" + json.dumps({"event": "end", "outcome": "superseded"}) + "\n"
    with open(tree.locate(DIRECTORY / run.name), "ab") as file:
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def _is_settled(records: list[dict[str, Any]]) -> bool:
    """Whether a run ended, and left nothing to be done by hand."""
    last = records[-1]
    return bool(last["event"] == "end" and last["outcome"] != "incomplete")


def _is_under_way(tree: HostTree, name: str) -> bool:
    with open(tree.locate(DIRECTORY / name), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _prune(tree: HostTree) -> None:
    for name in tree.children(DIRECTORY)[:-_KEPT]:
        if not _is_under_way(tree, name):
            tree.remove(DIRECTORY / name)
