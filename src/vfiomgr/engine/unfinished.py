"""An interrupted run as its journal describes it: what it intended, and how far it got."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vfiomgr.engine.journal import read_journal
from vfiomgr.engine.journal_files import DIRECTORY
from vfiomgr.engine.journal_records import all_of
from vfiomgr.engine.registry import read_checkpoint, read_request, read_step
from vfiomgr.engine.request import Checkpoint, Request
from vfiomgr.engine.step import Step, Topic
from vfiomgr.errors import InvalidDocument
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.engine.journal import CutOff, Journal
    from vfiomgr.host.tree import HostTree


class Unfinished(Value):
    """The content of an interrupted run's journal: the request, its steps, the begun ones."""

    request: Request
    checkpoint: Checkpoint | None
    """Facts from before the run; None if the request needs none."""
    steps: tuple[Step, ...]
    begun: tuple[int, ...]


def read_unfinished(tree: HostTree, name: str) -> Unfinished:
    """Read an interrupted run, so that it can be undone or finished.

    Raises:
        InvalidDocument: another version of vfiomgr wrote it, or it is damaged.

    """
    records = read_journal(tree, name)
    try:
        request = read_request(records[0]["request"])
        checkpoint = read_checkpoint(records[0].get("checkpoint"), request)
        steps = tuple(map(read_step, all_of(records, "steps")))
    except (KeyError, TypeError, ValueError) as error:
        message = f"cannot read {DIRECTORY / name}: {error}"
        raise InvalidDocument(
            " ".join(message.split())[:300],
            (
                "recover it with the version of vfiomgr that wrote it, or check the devices and "
                "remove the file"
            ),
        ) from None
    begun = [record["step"] for record in records if record["event"] == "begin"]
    undone = {record["step"] for record in records if record["event"] == "undo-done"}
    left = tuple(step for step in begun if step not in undone)
    return Unfinished(request, checkpoint, steps, left)


def overlapping(runs: Sequence[CutOff]) -> list[tuple[CutOff, ...]]:
    """Runs of one boot with common devices, each group oldest first, the newest group first.

    A reboot ends the changes to devices, so a run of another boot is undone separately.
    """
    groups: list[tuple[CutOff, ...]] = []
    for run in runs:
        joined = [group for group in groups if any(_overlap(run, other) for other in group)]
        groups = [group for group in groups if group not in joined]
        groups.append((*(other for group in joined for other in group), run))
    order = {run: number for number, run in enumerate(runs)}
    return [tuple(sorted(group, key=order.__getitem__)) for group in reversed(groups)]


def _overlap(one: CutOff, other: CutOff) -> bool:
    if one.boot_id != other.boot_id:
        return False
    return bool(one.locks & other.locks or one.subjects & other.subjects)


class Sequel(Value):
    """The steps of several runs in order, with consecutive numbers."""

    steps: tuple[Step, ...]
    firsts: tuple[int, ...]
    """The number of each run's first step."""
    begun: tuple[int, ...]
    """The steps to undo: those not covered by an earlier run."""
    covered: Mapping[int, int]
    """Each other begun step, with the earlier step that covers it."""


def sequel(runs: Sequence[Unfinished]) -> Sequel:
    """Several runs as one, the oldest first."""
    steps: list[Step] = []
    firsts: list[int] = []
    begun: list[list[tuple[int, Step]]] = []
    for run in runs:
        firsts.append(len(steps))
        begun.append([(len(steps) + number, run.steps[number]) for number in run.begun])
        steps += run.steps
    left_out = covered(begun)
    numbers = (number for run in begun for number, _ in run)
    return Sequel(
        tuple(steps), tuple(firsts), tuple(n for n in numbers if n not in left_out), left_out
    )


class Journals:
    """The journals of such runs, written as one: each gets the records of its own steps."""

    def __init__(self, journals: Sequence[Journal], runs: Sequel) -> None:
        self._journals = journals
        self._runs = runs

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The open files."""
        return tuple(one for journal in self._journals for one in journal.descriptors)

    def record(
        self, event: str, details: Mapping[str, object] | None = None, *, durable: bool = True
    ) -> None:
        """Append a record; an end record goes to all runs, the newest first.

        A step that an earlier run covers is undone with that one and recorded before it, so an
        interruption never leaves a later run alone.
        """
        number = (details or {}).get("step")
        if not isinstance(number, int):
            for journal in reversed(self._journals):
                journal.record(event, details, durable=durable)
            return
        alike = [step for step, by in self._runs.covered.items() if by == number]
        for step in (*(alike if event == "undo-done" else ()), number):
            run = max(n for n, first in enumerate(self._runs.firsts) if first <= step)
            own = step - self._runs.firsts[run]
            self._journals[run].record(event, {**(details or {}), "step": own}, durable=durable)


def covered(runs: Sequence[Sequence[tuple[int, Step]]]) -> dict[int, int]:
    """The steps of later runs that an earlier run covers, each with the covering step.

    `runs` are the numbered begun steps of each run, the oldest run first. What an earlier run
    changed is restored to the state before that run; the intermediate state that a later run found
    is not restored. The covering step is the first one of its run, so it is undone last.
    """
    found: dict[int, int] = {}
    first: dict[Topic, int] = {}
    for run in runs:
        own: dict[Topic, int] = {}
        for number, step in run:
            if step.inverse() is None:
                continue
            about = step.topic
            if about in first:
                found[number] = first[about]
            else:
                own.setdefault(about, number)
        first.update(own)
    return found
