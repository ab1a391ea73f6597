"""`vfiomgr recover`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.options import CHANGING, allow_option, flag, session_options
from vfiomgr.cli.output import print_document, say
from vfiomgr.diagnostic import REVERSIBLE, Override
from vfiomgr.engine.changes import host_of
from vfiomgr.errors import forbid_together
from vfiomgr.snapshot.session import Session, pass_session

if TYPE_CHECKING:
    from vfiomgr.engine.survey import CutOff


@click.command("recover")
@flag("--undo", text="Roll back all operations.")
@flag("--finish", text="Finish the operations.")
@allow_option(*REVERSIBLE)
@session_options(*CHANGING)
@pass_session
def recover(session: Session, *, undo: bool, finish: bool, allow: tuple[Override, ...]) -> None:
    """Roll back or finish interrupted operations.

    An operation is interrupted by a crash, a stuck kernel or a failed rollback. Without an option,
    all are rolled back, except the return of a display to the desktop, which is finished. With
    --dry-run, they are listed.

    \b
    Examples:
      vfiomgr recover --dry-run
      vfiomgr recover
      vfiomgr recover --finish
    """
    if undo and finish:
        forbid_together("--undo", "--finish", "an operation is either rolled back or finished")
    if finish and allow:
        why = "finishing applies the safety checks of the original command"
        forbid_together("--finish", "--allow", why)
    host = host_of(session)
    if session.dry_run:
        left = host.interrupted()
        if left.cut_off or not left.damaged or session.format != "table":
            _print_runs(session, left.cut_off, "left")
        return
    ended = host.recover(finish=finish, allow=allow, undo=undo)
    _print_runs(session, ended, "finished" if finish else "undone")


def _print_runs(session: Session, runs: tuple[CutOff, ...], state: str) -> None:
    if session.format != "table":
        items = [
            {
                "journal": run.name,
                "summary": run.summary,
                "step": run.step,
                "state": "finished" if run.is_finished else state,
            }
            for run in runs
        ]
        print_document("RecoveryList", {"items": items}, session.format)
        return
    for run in runs:
        left = "interrupted" if state == "left" else "finished" if run.is_finished else state
        say(f"{left}: {run.summary}, in step: {run.step}")
    if not runs:
        say("nothing to do: no interrupted operations")
