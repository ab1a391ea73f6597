"""Ends the runs that were left half done: undoes what they had begun, or finishes them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal
from vfiomgr.executor.change import apply
from vfiomgr.executor.journal import Journal, cut_off_runs, read_unfinished, supersede
from vfiomgr.executor.lock import hold
from vfiomgr.executor.rights import without_kernel
from vfiomgr.executor.run import undo as undo_steps
from vfiomgr.model.intent import ApplyLayout
from vfiomgr.model.path import BOOT_ID
from vfiomgr.model.step import subject
from vfiomgr.planner.recovery import plan_undo, refuse_other_devices, refuse_what_is_kept

if TYPE_CHECKING:
    from vfiomgr.executor.change import Work
    from vfiomgr.executor.journal import CutOff, Unfinished
    from vfiomgr.model.intent import Allowance
    from vfiomgr.planner.recovery import Undoing


def recover(work: Work, allow: frozenset[Allowance], *, finish: bool) -> tuple[CutOff, ...]:
    """End all that can be ended: undo them, the latest first, or `finish` them.

    Raises:
        Refusal: the kernel has still not returned, a guard speaks against one of them, or it takes
            a kernel that the tree does not have.

    """
    ended: list[CutOff] = []
    refused: list[Refusal] = []
    runs = cut_off_runs(work.tree, work.tree.read(BOOT_ID))
    for run in runs if finish else reversed(runs):
        try:
            _require_kernel(run, work)
            if finish:
                _finish(run, work)
            else:
                _undo(run, work, allow)
        except Refusal as refusal:
            refused.append(refusal)  # what is stuck keeps no other run from being ended
        else:
            ended.append(run)
    if refused:
        for run in ended:
            work.on_note(f"{'finished' if finish else 'undone'}: {run.summary}")
        raise refused[0]
    return tuple(ended)


def _require_kernel(run: CutOff, work: Work) -> None:
    """Make sure that the tree can end a run.

    Raises:
        Refusal: it is about devices, and the tree is no running host.

    """
    if work.tree.is_live:
        return
    if work.needs_kernel(read_unfinished(work.tree, run.name).intent):
        message = f"{run.summary}: {without_kernel(work.tree)}"
        raise Refusal(message, "run vfiomgr recover on that host itself; of files it is done here")


def _undo(run: CutOff, work: Work, allow: frozenset[Allowance]) -> None:
    """Undo what a run had begun, as far as its devices are still there.

    It is planned twice: a child that is stuck in the kernel keeps the locks of its run, and
    nobody should wait for those.
    """
    _plan_undo(run, work, allow)
    with hold(work.tree, run.locks, work.on_note):
        if run not in cut_off_runs(work.tree, work.tree.read(BOOT_ID)):
            return  # another process has ended it meanwhile
        left, undoing = _plan_undo(run, work, allow)
        for text in undoing.notes:
            work.on_note(text)
        with Journal.resume(work.tree, run.name) as journal:
            undo_steps(
                left.steps, undoing.steps, tree=work.tree, journal=journal, deadline=work.limit
            )


def _plan_undo(run: CutOff, work: Work, allow: frozenset[Allowance]) -> tuple[Unfinished, Undoing]:
    left = read_unfinished(work.tree, run.name)
    host = work.scan(left.intent)
    is_of_this_boot = run.is_of_this_boot
    undoing = plan_undo(host, left.steps, left.begun, allow, is_of_this_boot=is_of_this_boot)
    refuse_what_is_kept(host, left.steps, undoing, allow)
    return left, undoing


def _finish(run: CutOff, work: Work) -> None:
    """Do what the run was to do, with the devices that it was to do it with."""
    left = read_unfinished(work.tree, run.name)
    refuse_other_devices(work.scan(left.intent), left.steps)
    intent = left.intent
    if isinstance(intent, ApplyLayout):
        begun = map(subject, (left.steps[number] for number in left.begun))
        intent = replace(intent, begun=tuple(dict.fromkeys((*intent.begun, *filter(None, begun)))))
    apply(intent, work)
    if run in cut_off_runs(work.tree, work.tree.read(BOOT_ID)):
        supersede(work.tree, run)
