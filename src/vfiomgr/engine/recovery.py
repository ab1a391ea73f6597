"""Rolls back or finishes interrupted operations."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import blocker, refusal
from vfiomgr.engine.journal import Journal, cut_off_runs, supersede, survey, unreadable
from vfiomgr.engine.locks import hold
from vfiomgr.engine.privileges import without_kernel
from vfiomgr.engine.run import undo as undo_steps
from vfiomgr.engine.transaction import apply
from vfiomgr.engine.undo import plan_undo, refuse_other_devices
from vfiomgr.engine.unfinished import Journals, overlapping, read_unfinished, sequel
from vfiomgr.errors import InvalidDocument, Refusal
from vfiomgr.paths import BOOT_ID

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Override
    from vfiomgr.engine.journal import CutOff
    from vfiomgr.engine.transaction import ApplyContext
    from vfiomgr.engine.undo import UndoPlan
    from vfiomgr.engine.unfinished import Sequel


def recover(work: ApplyContext, allow: frozenset[Override], *, finish: bool) -> tuple[CutOff, ...]:
    """Roll back all interrupted operations, newest first, or `finish` them.

    Raises:
        Refusal: the kernel has not returned yet, a safety check forbids one of them, or it
        requires a running host.
        InvalidDocument: a journal cannot be read.

    """
    ended: list[CutOff] = []
    refused: list[Refusal | InvalidDocument] = []
    left = survey(work.tree, work.tree.read(BOOT_ID))
    for runs in [(run,) for run in left.cut_off] if finish else overlapping(left.cut_off):
        try:
            for run in runs:
                _require_kernel(run, work)
            if finish:
                _finish(runs[0], work)
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


def _require_kernel(run: CutOff, work: ApplyContext) -> None:
    """Require a tree in which the run can be rolled back or finished.

    Raises:
        Refusal: it concerns devices, and the tree is not a running host.

    """
    if work.tree.is_live:
        return
    if work.needs_kernel(read_unfinished(work.tree, run.name).request):
        message = f"{run.summary}: {without_kernel(work.tree)}"
        raise refusal(
            [
                blocker(
                    "not-a-running-host",
                    run.name,
                    message,
                    (
                        "run vfiomgr recover on that host; here, only operations on files can be "
                        "recovered"
                    ),
                )
            ]
        )


def _undo(runs: tuple[CutOff, ...], work: ApplyContext, allow: frozenset[Override]) -> None:
    """Undo what interrupted runs on the same devices had begun, for devices that still exist.

    It is planned twice: a child that is stuck in the kernel keeps the locks of its run, and nobody
    should wait for them.
    """
    _plan_undo(runs, work, allow)
    locks = frozenset(lock for run in runs for lock in run.locks)
    with hold(work.tree, locks, work.on_note):
        runs = _still_left(runs, locks, work)
        if not runs:
            return  # another process has ended them meanwhile
        together, undoing = _plan_undo(runs, work, allow)
        for text in undoing.notes:
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
        raise refusal(
            [blocker("interrupted-meanwhile", ", ".join(sorted(locks)), message, "vfiomgr recover")]
        )
    return left


def _plan_undo(
    runs: tuple[CutOff, ...], work: ApplyContext, allow: frozenset[Override]
) -> tuple[Sequel, UndoPlan]:
    left = [read_unfinished(work.tree, run.name) for run in runs]
    together = sequel(left)
    host = work.scan(*(run.request for run in left))
    is_of_this_boot = runs[0].is_of_this_boot
    undoing = plan_undo(
        host, together.steps, together.begun, allow, is_of_this_boot=is_of_this_boot
    )
    return together, undoing


def _finish(run: CutOff, work: ApplyContext) -> None:
    """Finish the interrupted run, with the devices that it was planned for."""
    left = read_unfinished(work.tree, run.name)
    refuse_other_devices(work.scan(left.request), left.steps)
    begun = (left.steps[number].subject for number in left.begun)
    checkpoint = left.checkpoint
    if checkpoint is not None:
        checkpoint = checkpoint.resumed(filter(None, begun))
    apply(left.request, work, checkpoint)
    if run in cut_off_runs(work.tree, work.tree.read(BOOT_ID)):
        supersede(work.tree, run)
