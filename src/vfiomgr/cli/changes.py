"""Shared by all commands that change the host: plan or apply a request, and print the result."""

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
    help="Rebuild the initramfs if its udev rules change.",
)


def plan_or_apply(
    session: Session, request: Request | NamedRequest, *, only_files: bool = False
) -> Outcome | None:
    """Apply a request; with --dry-run, print its plan and return None.

    With `only_files` the request needs no devices, so an image is sufficient.
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
    """The host of a session; steps are printed on a terminal and with -v."""
    is_watched = session.verbose or sys.stderr.isatty()
    usual: Reports = {"on_note": note, "on_step": tell_step if is_watched else None}
    usual.update(reports)
    host = Host(deadline=session.timeout, **usual)
    session.share_with(host)
    return host


def tell_step(step: Step) -> None:
    """Print a step as it begins."""
    note(f"  {step.describe()}")


def confirm(session: Session, question: str) -> None:
    """Ask before a safety check is overridden; without a terminal, the option is sufficient."""
    if session.yes or session.dry_run or not sys.stdin.isatty():
        return
    if not click.confirm(printable(question), err=True):
        message = "cannot continue: the override of the safety check was not confirmed"
        refuse("not-confirmed", "", message, "nothing was changed; answer yes, or pass --yes")


def print_outcome(session: Session, outcome: Outcome, lines: list[str], **facts: object) -> None:
    """Print the result of a change: `lines` for people, steps and `facts` for programs."""
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
    """Print a plan, and what could not be checked."""
    if session.format != "table":
        body = {**plan.to_document(), "not_checked": plan.not_checked}
        print_document("Plan", body, session.format)
        return
    for text in plan.lines():
        say(text)
    for text in plan.not_checked:
        note(f"not checked: {text}")
