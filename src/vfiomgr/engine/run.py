"""Carry out a plan: journal, act, verify; after a failure, undo in reverse.

Workers carry out the steps; groups run in parallel. A step that the kernel does not return from is
abandoned at the deadline: nothing more is written, and the journal stays open for `recover`.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from vfiomgr.engine.journal import FIRST_STEPS, Journal
from vfiomgr.engine.plan import DEADLINE, Plan, Schedule, Step, joined
from vfiomgr.engine.registry import perform, verify
from vfiomgr.engine.worker import Result, WorkerPool
from vfiomgr.errors import (
    DeviceDamaged,
    RollbackIncomplete,
    RolledBack,
    StuckInKernel,
    VfiomgrError,
)
from vfiomgr.host import bounded, udev
from vfiomgr.paths import PCI_DEVICES
from vfiomgr.pci.iommu import group_number
from vfiomgr.pci.model import is_address
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

_MOST_WORKERS = 8


class Recorder(Protocol):
    """A journal, or several as one."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Open files that a child must close."""

    def record(
        self, event: str, details: Mapping[str, object] | None = None, *, durable: bool = True
    ) -> None:
        """Append one record."""


class Outcome(Value):
    """The result of a run."""

    plan: Plan
    is_changed: bool
    """False if the host already was in the desired state."""


def run(  # noqa: PLR0913 - all but the plan and where have defaults
    plan: Plan,
    *,
    tree: HostTree,
    journal: Journal,
    on_step: Callable[[Step], None] = lambda _step: None,
    deadline: float = DEADLINE,
    go_on: Callable[[], Plan | None] = lambda: None,
    on_done: Callable[[Plan], None] = lambda _plan: None,
) -> Outcome:
    """Carry out all steps of a plan and of its follow-up plans, or none.

    After each plan, `go_on` returns the next one for the host as it then is; an error from it
    undoes all plans. `on_done` records what the completed run means for earlier ones.

    Raises:
        RolledBack: a step failed; all steps were undone.
        RollbackIncomplete: a step failed, and so did part of the rollback; the message says which.
        StuckInKernel: the kernel did not return from a step within the deadline.
    """
    done = Plan(plan.summary, ())
    begun: list[int] = []
    following: Plan | None = plan
    while following is not None:
        done = _joined(done, following)
        following = _advance(
            _Stage(following, done.steps, begun, go_on), tree, journal, on_step, deadline
        )
    with _recording():
        on_done(done)
    _note(journal, "end", outcome="done")
    return Outcome(done, is_changed=bool(done.steps))


class _Stage(Value):
    """One of several plans that are carried out in sequence."""

    plan: Plan
    steps: tuple[Step, ...]
    """The steps of all plans up to this one."""
    begun: list[int]
    go_on: Callable[[], Plan | None]


def _advance(
    stage: _Stage,
    tree: HostTree,
    journal: Journal,
    on_step: Callable[[Step], None],
    deadline: float,
) -> Plan | None:
    """Carry out one plan and return the next one. After a failure, everything is undone."""
    plan = stage.plan
    schedule = Schedule(plan, first=len(stage.steps) - len(plan.steps))
    if any(step.needs_udev for step in plan.steps):
        udev.rules_give_access(tree)  # read once, before children are forked that ask for it
    following: Plan | None = None
    with _crew(stage.steps, tree, journal, schedule.width, deadline) as crew:
        work = _Run(stage.steps, tree, journal, crew, stage.begun)
        try:
            failure = work.advance(journal, schedule, on_step)
            following = stage.go_on() if failure is None else None
        except (Exception, KeyboardInterrupt) as cause:  # noqa: BLE001 - a defect too is undone
            failure = Result(work.begun[-1] if work.begun else 0, cause)
        if failure is not None:
            with _undisturbed():
                work.end_failed(failure)
    return following


def _joined(one: Plan, other: Plan) -> Plan:
    """Two plans in sequence as one, with the notes of both."""
    if not one.steps:
        return other
    both = joined(other.summary, (one, other))
    return replace(both, already=one.already, deferred=())


def undo(
    steps: Sequence[Step],
    begun: Iterable[int],
    *,
    tree: HostTree,
    journal: Recorder,
    deadline: float = DEADLINE,
) -> None:
    """Undo the begun steps of an interrupted run, in reverse.

    Raises:
        RollbackIncomplete: part of it failed; the message says which.
    """
    with _crew(steps, tree, journal, 1, deadline) as crew, _undisturbed():
        left = _Run(steps, tree, journal, crew, list(begun)).undo()
    if left:
        message = f"rollback failed: {'; '.join(left)}"
        raise RollbackIncomplete(message, "see dmesg; to try again: vfiomgr recover")


def _crew(
    steps: Sequence[Step], tree: HostTree, journal: Recorder, width: int, deadline: float
) -> WorkerPool:
    """Workers for all steps (by number) and their inverses (numbered after them)."""
    tasks = [
        *(partial(_do, step, tree) for step in steps),
        *(partial(_do_inverse, step, tree) for step in steps),
    ]
    records = [step.is_record for step in steps]
    return WorkerPool(
        tasks,
        size=min(width, _MOST_WORKERS),
        in_children=tree.can_hang,
        deadline=deadline,
        closed=journal.descriptors,
        own=frozenset(number for number, is_own in enumerate((*records, *records)) if is_own),
    )


def _do(step: Step, tree: HostTree) -> None:
    perform(step, tree)
    verify(step, tree)


def _do_inverse(step: Step, tree: HostTree) -> None:
    inverse = step.inverse()
    if inverse is not None:
        perform(inverse, tree)


class _Run:
    """One run: its steps, and which of them have begun."""

    def __init__(
        self,
        steps: Sequence[Step],
        tree: HostTree,
        journal: Recorder,
        crew: WorkerPool,
        begun: list[int],
    ) -> None:
        self._steps = steps
        self._tree = tree
        self._journal = journal
        self._crew = crew
        self._outlasts_reboot = any(step.outlasts_reboot for step in steps)
        self.begun = begun
        self._failed: set[int] = set()

    def advance(
        self, journal: Journal, schedule: Schedule, on_step: Callable[[Step], None]
    ) -> Result | None:
        """Begin all steps that may begin, until none are left; returns the first failure."""
        while (ready := schedule.ready()) or self._crew.is_busy:
            starting = ready[: self._crew.room]
            if starting:
                journal.begin(starting, durable=self._are_durable(len(starting)))
            for number in starting:
                self.begun.append(number)
                schedule.begin(number)
                on_step(self._steps[number])
                self._crew.start(number, self._steps[number].deadline)
            result = self._crew.wait_a_moment()
            if result is None:
                continue
            if result.error is not None or result.stuck_pid is not None:
                self._failed.add(result.task)
                return result
            journal.record("done", {"step": result.task}, durable=False)
            schedule.finish(result.task)
        return None

    def _are_durable(self, starting: int) -> bool:
        """Whether it is recorded durably that so many more steps begin.

        A reboot ends the effects of most steps, and with them the need to undo them: a power cut
        may then lose the last beginnings (saved original states count only for their boot). An
        fsync takes longer than most steps.
        """
        begun = len(self.begun)
        is_due = begun // FIRST_STEPS != (begun + starting) // FIRST_STEPS
        return self._outlasts_reboot or begun < FIRST_STEPS or is_due

    def end_failed(self, failure: Result) -> None:
        """Wait for the running steps, then undo all begun steps."""
        failures = [failure]
        while self._crew.is_busy:
            failures.append(self._crew.wait())
            if failures[-1].error is not None:
                self._failed.add(failures[-1].task)
        for result in failures:
            if result.error is not None:
                said = str(result.error) or type(result.error).__name__
                _note(self._journal, "failed", step=result.task, error=said)
        late = [result for result in failures if result.stuck_pid is not None]
        if late:
            raise self._leave_stuck(self._steps, late)
        assert failure.error is not None  # noqa: S101 - neither done nor stuck
        self._roll_back(failure.error)

    def _roll_back(self, cause: BaseException) -> None:
        left = self.undo()
        what = "interrupted" if isinstance(cause, KeyboardInterrupt) else str(cause)
        hint = cause.hint if isinstance(cause, VfiomgrError) else ""
        if left:
            message = f"{what}; and the rollback failed: {'; '.join(left)}"
            remedy = f"{hint or 'see dmesg'}; then try the rollback again: vfiomgr recover"
            raise RollbackIncomplete(message, remedy) from cause
        if isinstance(cause, DeviceDamaged):
            raise RollbackIncomplete(what, hint) from cause
        message = f"{what}; everything is as it was before"
        done = (self._steps[number] for number in self.begun if number not in self._failed)
        lasting = ", ".join(step.report() for step in done if step.is_lasting)
        if lasting:
            message += f", except: {lasting}"
        raise RolledBack(message, hint) from cause

    def undo(self) -> list[str]:
        """Undo the begun steps in reverse, including the failed one, which may be half done.

        Returns descriptions of what could not be undone.
        """
        left: list[str] = []
        for number in reversed(self.begun):
            inverse = self._steps[number].inverse()
            if inverse is None or (left and inverse.needs_all_undone):
                continue
            _note(self._journal, "undo-begin", step=number)
            self._crew.start(len(self._steps) + number, inverse.deadline)
            left += self._end_undo(number, inverse)
        left = left or self._repeat()
        _note(self._journal, "end", outcome="incomplete" if left else "rolled-back")
        return left

    def _repeat(self) -> list[str]:
        """Repeat steps that leave no trace, e.g. an image made of files that are restored now."""
        repeated: list[Step] = []
        left: list[str] = []
        for number in self.begun:
            step = self._steps[number]
            if not step.leaves_no_trace or number in self._failed:
                continue
            if step in repeated:
                _note(self._journal, "undo-done", step=number)
                continue
            repeated.append(step)
            self._crew.start(number, step.deadline)
            left += self._end_undo(number, step)
        return left

    def _end_undo(self, number: int, inverse: Step) -> list[str]:
        """Wait for an inverse step; returns a description if it could not be done."""
        failed = self._failed_undo(number, inverse, self._crew.wait())
        if failed:
            return [failed]
        _note(self._journal, "undo-done", step=number)
        return []

    def _failed_undo(self, number: int, inverse: Step, result: Result) -> str | None:
        if result.stuck_pid is not None:
            steps = [*self._steps[:number], inverse]
            return self._leave_stuck(steps, [replace(result, task=number)]).message
        if result.error is not None:
            _note(self._journal, "undo-failed", step=number, error=str(result.error))
            return f"{inverse.describe()} ({result.error})"
        return None

    def _leave_stuck(self, steps: Sequence[Step], results: Sequence[Result]) -> RollbackIncomplete:
        """Record the unfinished steps; the journal gets no end record."""
        told: list[str] = []
        devices: list[str] = []
        for result in results:
            step, pid = steps[result.task], result.stuck_pid or 0
            _note(self._journal, "stuck", step=result.task, pid=pid)
            told.append(f"{step.describe()} (PID {pid})")
            name = step.subject
            if name is not None:
                bounded.mark(self._tree, name, pid, step.describe())
                devices.append(name)
            elif step.is_program:
                return _late(step)
        message = f"the kernel has not returned from: {'; '.join(told)}"
        locks = frozenset(self._lock_of(device) for device in devices)
        pid = results[0].stuck_pid or 0
        return StuckInKernel(message, tuple(devices), pid=pid, locks=locks)

    def _lock_of(self, device: str) -> str:
        """The name of the lock of a function or a vGPU."""
        if not is_address(device):
            return f"vgpu-{device}"
        group = group_number(self._tree, PCI_DEVICES / device)
        return f"device-{device}" if group is None else f"group-{group}"


def _late(step: Step) -> RollbackIncomplete:
    """The late one is not the kernel but a program, which keeps running."""
    command = step.commands()[0]
    return RollbackIncomplete(
        f"{command} has not ended within {step.deadline:g} seconds and keeps running; "
        "everything else is done",
        "look for it with ps; when it has ended, vfiomgr recover --finish runs it again and keeps "
        "the changes, and vfiomgr recover undoes them",
    )


def _note(journal: Recorder, event: str, **details: object) -> None:
    """Record if possible: a full disk must not prevent the restoration of a device."""
    with _recording():
        journal.record(event, details)


@contextmanager
def _recording() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        warnings.warn(f"the journal cannot be written: {error}", stacklevel=4)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Block Ctrl-C, a lost terminal and service managers during a rollback."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
