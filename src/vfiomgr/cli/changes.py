"""What all commands that change the host share: plan or apply a request, say what came of it."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Unpack

import click

from vfiomgr.cli.output import note, print_document, say
from vfiomgr.cli.progress import shown_progress
from vfiomgr.diagnostic import refuse
from vfiomgr.documents.printable import printable
from vfiomgr.library import Host

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.cli.session import Session
    from vfiomgr.engine.plan import Plan
    from vfiomgr.engine.request import Request
    from vfiomgr.engine.run import Outcome
    from vfiomgr.engine.step import Step
    from vfiomgr.library import NamedRequest, Reports

update_initramfs_option = click.option(
    "--update-initramfs",
    is_flag=True,
    help="Make the initramfs anew where rules that change are in it.",
)


def plan_or_apply(
    session: Session, request: Request | NamedRequest, *, only_files: bool = False
) -> Outcome | None:
    """Print the plan of a request with --dry-run (and return None); apply it otherwise.

    With `only_files` it needs no devices, so that an image will do.
    """
    if session.dry_run:
        print_plan(session, host_of(session).plan(request, only_files=only_files))
        return None
    with followed(session, tells_steps=session.verbose > 0) as host:
        return host.apply(request, only_files=only_files)


@contextmanager
def followed(session: Session, *, tells_steps: bool = True) -> Iterator[Host]:
    """The host of a session, whose changes are shown as long as they are under way.

    A terminal shows a bar; elsewhere each step is a line where it `tells_steps`.
    """
    if not sys.stderr.isatty():
        yield host_of(session, on_step=tell_step if tells_steps else None)
        return
    with shown_progress() as reports:
        yield host_of(session, **reports)


def host_of(session: Session, **reports: Unpack[Reports]) -> Host:
    """The host of a session; steps of changes are told to whoever watches."""
    is_watched = session.verbose or sys.stderr.isatty()
    usual: Reports = {"on_note": note, "on_step": tell_step if is_watched else None}
    usual.update(reports)
    host = Host(deadline=session.timeout, **usual)
    session.share_with(host)
    return host


def tell_step(step: Step) -> None:
    """A line for a step as it begins."""
    note(f"  {step.describe()}")


def confirm(session: Session, question: str) -> None:
    """Ask a person before a guard is overridden; without a terminal the flag is the answer."""
    if session.yes or session.dry_run or not sys.stdin.isatty():
        return
    if not click.confirm(printable(question), err=True):
        message = "the guard stands: the question was not answered with yes"
        refuse("not-confirmed", "", message, "answer yes, or pass --yes; nothing was changed")


def print_outcome(session: Session, outcome: Outcome, lines: list[str], **facts: object) -> None:
    """What a run did: `lines` for people, the steps and `facts` for programs."""
    plan = outcome.plan
    if session.format != "table":
        body = {"changed": outcome.is_changed, **plan.to_document(), **facts}
        print_document("Outcome", body, session.format)
        return
    for text in (*plan.notes, *plan.already):
        say(text)
    if not outcome.is_changed:
        say("nothing to do")
    for line in lines:
        say(line)


def print_plan(session: Session, plan: Plan) -> None:
    """What would be done, with what nobody could look at."""
    if session.format != "table":
        body = {**plan.to_document(), "not_checked": plan.not_checked}
        print_document("Plan", body, session.format)
        return
    for text in plan.lines():
        say(text)
    for text in plan.not_checked:
        note(f"not checked: {text}")
