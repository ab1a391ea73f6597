"""Rolls back or finishes interrupted operations, as their journals describe them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from msgspec.structs import replace

from vfiomgr.diagnostic import Override, refuse
from vfiomgr.engine.journal import Journal, unreadable
from vfiomgr.engine.locks import hold, without_kernel
from vfiomgr.engine.plan import Step, Topic
from vfiomgr.engine.run import undo as undo_steps
from vfiomgr.engine.survey import CutOff, cut_off_runs, survey
from vfiomgr.engine.transaction import ApplyContext, apply
from vfiomgr.engine.unfinished import (
    UndoPlan,
    Unfinished,
    plan_undo,
    read_unfinished,
    refuse_other_devices,
)
from vfiomgr.errors import InvalidDocument, Refusal
from vfiomgr.paths import BOOT_ID
from vfiomgr.value import Value


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
        begun.append([(len(steps) + number, run.steps[number]) for number in run.left])
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


def recover(
    work: ApplyContext, allow: frozenset[Override], *, finish: bool, undo: bool = False
) -> tuple[CutOff, ...]:
    """Roll back all interrupted operations, newest first, or `finish` them.

    Those that return a screen to the host are finished, unless all are to be undone (`undo`).

    Raises:
        Refusal: the kernel has not returned yet, a safety check forbids one of them, or it
        requires a running host.
        InvalidDocument: a journal cannot be read.
    """
    ended: list[CutOff] = []
    refused: list[Refusal | InvalidDocument] = []
    left = survey(work.tree, work.tree.read(BOOT_ID))
    for group in [(run,) for run in left.cut_off] if finish else overlapping(left.cut_off):
        runs = group
        try:
            for run in runs:
                _require_kernel(run, work)
            if finish:
                _finish(runs[0], work)
            elif not undo and _is_return(runs[-1], work):
                runs = _finish_return(runs, work, allow)
            else:
                _undo(runs, work, allow)
        except (Refusal, InvalidDocument) as refusal:
            refused.append(refusal)  # what is stuck keeps no other run from being ended
        else:
            ended += reversed(runs)
    refused += [unreadable(journal.name, journal.why) for journal in left.damaged]
    if refused:
        for run in ended:
            work.on_note(f"{'finished' if finish else 'undone'}: {run.summary}")
        raise refused[0]
    return tuple(ended)


def _is_return(run: CutOff, work: ApplyContext) -> bool:
    """Whether a run of this boot returns what the host needs."""
    if not run.is_of_this_boot:
        return False
    return any(step.is_return for step in read_unfinished(work.tree, run.name).steps)


def _finish_return(
    runs: tuple[CutOff, ...], work: ApplyContext, allow: frozenset[Override]
) -> tuple[CutOff, ...]:
    """Finish the newest run, and undo what it leaves of the others."""
    _finish(runs[-1], work)
    left = cut_off_runs(work.tree, work.tree.read(BOOT_ID))
    others = tuple(run for run in runs[:-1] if run.name in {one.name for one in left})
    if others:
        _undo(others, work, allow)
    return (*runs[:-1], replace(runs[-1], is_finished=True))


def recover_device(
    work: ApplyContext,
    name: str,
    allow: frozenset[Override] = frozenset(),
    own: frozenset[str] = frozenset(),
) -> None:
    """Roll back the interrupted operations that concern a device or vGPU, and what depends on them.

    `allow` only holds if all of these operations concern nothing but the devices `own`.

    Raises:
        Refusal: the kernel has not returned yet, or a safety check forbids it.
        InvalidDocument: a journal cannot be read.
    """
    left = survey(work.tree, work.tree.read(BOOT_ID))
    for runs in overlapping(left.cut_off):
        if any(name in run.subjects for run in runs):
            _undo(runs, work, allow, own)


def _require_kernel(run: CutOff, work: ApplyContext) -> None:
    """Require a tree in which the run can be rolled back or finished.

    Raises:
        Refusal: it concerns devices, and the tree is not a running host.
    """
    if work.tree.is_live:
        return
    if work.needs_kernel(read_unfinished(work.tree, run.name).request):
        message = f"{run.summary}: {without_kernel(work.tree)}"
        refuse(
            "not-a-running-host",
            run.name,
            message,
            "run vfiomgr recover on that host; here, only operations on files can be recovered",
        )


def _undo(
    runs: tuple[CutOff, ...],
    work: ApplyContext,
    allow: frozenset[Override],
    own: frozenset[str] | None = None,
) -> None:
    """Undo what interrupted runs on the same devices had begun, for devices that still exist.

    It is planned twice: a child that is stuck in the kernel keeps the locks of its run, and nobody
    should wait for them.
    """
    _plan_undo(runs, work, allow, own)
    locks = frozenset(lock for run in runs for lock in run.locks)
    with hold(work.tree, locks, work.on_note):
        runs = _still_left(runs, locks, work)
        if not runs:
            return  # another process has ended them meanwhile
        together, undoing = _plan_undo(runs, work, allow, own)
        last = (together.steps[n] for n in undoing.steps if together.steps[n].leaves_no_trace)
        for text in (*undoing.notes, *(f"last: {step.describe()}" for step in last)):
            work.on_note(text)
        with ExitStack() as open_journals:
            journals = [
                open_journals.enter_context(Journal.resume(work.tree, run.name)) for run in runs
            ]
            undo_steps(
                together.steps,
                undoing.steps,
                tree=work.tree,
                journal=Journals(journals, together),
                deadline=work.limit,
            )


def _still_left(
    runs: tuple[CutOff, ...], locks: frozenset[str], work: ApplyContext
) -> tuple[CutOff, ...]:
    """The runs that are still unfinished, and later runs interrupted on the same devices.

    Raises:
        Refusal: a later run concerns more than what is locked.
    """
    now = cut_off_runs(work.tree, work.tree.read(BOOT_ID))
    groups = [group for group in overlapping(now) if not set(runs).isdisjoint(group)]
    left = tuple(run for run in now if any(run in group for group in groups))
    if not locks.issuperset(lock for run in left for lock in run.locks):
        message = "another vfiomgr was interrupted on the same devices in the meantime"
        refuse("interrupted-meanwhile", ", ".join(sorted(locks)), message, "vfiomgr recover")
    return left


def _plan_undo(
    runs: tuple[CutOff, ...],
    work: ApplyContext,
    allow: frozenset[Override],
    own: frozenset[str] | None,
) -> tuple[Sequel, UndoPlan]:
    if own is not None and not all(run.subjects <= own for run in runs):
        allow = frozenset()  # somebody else's operation is one of them
    left = [read_unfinished(work.tree, run.name) for run in runs]
    together = sequel(left)
    host = work.scan(*(run.request for run in left))
    is_of_this_boot = runs[0].is_of_this_boot
    undoing = plan_undo(
        host, together.steps, together.begun, allow, is_of_this_boot=is_of_this_boot
    )
    return together, undoing


def _finish(run: CutOff, work: ApplyContext) -> None:
    """Finish the interrupted run, with the devices that it was planned for.

    If later runs have replaced the rest of it, only what leaves no trace is repeated.
    """
    left = read_unfinished(work.tree, run.name)
    if left.settled and left.due.issuperset(left.left):
        _undo((run,), work, frozenset())
        return
    refuse_other_devices(work.scan(left.request), left.steps)
    apply(left.request, work, left.resumed)
