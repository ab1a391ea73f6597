"""`vfiomgr recover`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.changes import host_of
from vfiomgr.cli.options import CHANGING, session_options
from vfiomgr.cli.output import print_document, say
from vfiomgr.cli.session import Session, pass_session
from vfiomgr.diagnostic import REVERSIBLE
from vfiomgr.usage import forbid_together

if TYPE_CHECKING:
    from vfiomgr.diagnostic import Override
    from vfiomgr.engine.journal import CutOff


@click.command("recover")
@click.option("--undo", is_flag=True, help="Put everything back.  [default]")
@click.option("--finish", is_flag=True, help="Do what the run was to do.")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(REVERSIBLE),
    help="Override a guard; a refusal names the one.",
)
@session_options(*CHANGING)
@pass_session
def recover(session: Session, *, undo: bool, finish: bool, allow: tuple[Override, ...]) -> None:
    """End runs that were left half done: by a crash, a stuck kernel, a failed roll-back.

    Without a flag they are undone. With --dry-run they are listed.

    \b
    Examples:
      vfiomgr recover --dry-run
      vfiomgr recover
      vfiomgr recover --finish
    """
    if undo and finish:
        forbid_together("--undo", "--finish", "a run goes either back or on")
    if finish and allow:
        why = "a run is finished with the guards that its command had"
        forbid_together("--finish", "--allow", why)
    host = host_of(session)
    if session.dry_run:
        left = host.interrupted()
        if left.cut_off or not left.damaged or session.format != "table":
            _print_runs(session, left.cut_off, "left")
        return
    ended = host.recover(finish=finish, allow=allow)
    _print_runs(session, ended, "finished" if finish else "undone")


def _print_runs(session: Session, runs: tuple[CutOff, ...], state: str) -> None:
    if session.format != "table":
        items = [
            {"journal": run.name, "summary": run.summary, "step": run.step, "state": state}
            for run in runs
        ]
        print_document("RecoveryList", {"items": items}, session.format)
        return
    for run in runs:
        left = "left half done" if state == "left" else state
        say(f"{left}: {run.summary}, cut off in: {run.step}")
    if not runs:
        say("nothing to do: no run was left half done")
