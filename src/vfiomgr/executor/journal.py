"""The journal: what a run is about to do, written and fsynced before it is done.

One file per run in /var/lib/vfiomgr/journal, one JSON record per line: `plan` with all steps,
then `begin`, `done` and `failed` of each step (`undo-…` while rolling back), and `end`. A file
without `end` is a run that was cut off; a last line that is no whole record was never written.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any, Self

from vfiomgr.host.tree import sync_directory
from vfiomgr.model.path import STATE, HostPath
from vfiomgr.model.snapshot import to_jsonable

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.plan import Plan

DIRECTORY = STATE / "journal"
_KEPT = 100
"""Finished runs to keep; older ones are removed."""


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
        self.record("plan", summary=plan.summary, boot_id=boot_id, steps=to_jsonable(plan.steps))
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
    """The whole records of a journal, up to the first that was cut off."""
    records: list[dict[str, Any]] = []
    for line in (tree.read_text(DIRECTORY / name) or "").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def unfinished(tree: HostTree) -> list[str]:
    """Names of journals whose run neither ended nor is under way in a living process."""
    return [
        name
        for name in tree.children(DIRECTORY)
        if not _is_finished(tree, name) and not _is_running(tree, name)
    ]


def _is_finished(tree: HostTree, name: str) -> bool:
    records = read_journal(tree, name)
    return bool(records) and records[-1]["event"] == "end"


def _is_running(tree: HostTree, name: str) -> bool:
    pid = name.split("-")[1]
    command = tree.read(HostPath("/proc") / pid / "comm")
    return command is not None and "vfiomgr" in command


def _prune(tree: HostTree) -> None:
    finished = [name for name in tree.children(DIRECTORY) if _is_finished(tree, name)]
    for name in finished[:-_KEPT]:
        tree.remove(DIRECTORY / name)
