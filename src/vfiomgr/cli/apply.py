"""What all commands that change the host share: plan or apply an intent, say what came of it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from vfiomgr import api
from vfiomgr.cli.output import note, print_document, say
from vfiomgr.cli.printable import printable
from vfiomgr.documents.jsonable import to_jsonable
from vfiomgr.errors import Refusal
from vfiomgr.passthrough.requests import Bind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.cli.session import Session
    from vfiomgr.engine.plan import Plan
    from vfiomgr.engine.request import Request
    from vfiomgr.engine.step import Step
    from vfiomgr.snapshot.model import HostSnapshot

update_initramfs_option = click.option(
    "--update-initramfs",
    is_flag=True,
    help="Make the initramfs anew where rules that change are in it.",
)


def plan_or_apply(
    session: Session, intent: Request, *, only_files: bool = False
) -> api.Outcome | None:
    """Print the plan of an intent with --dry-run (and return None); apply it otherwise.

    With `only_files` it needs no devices, so that an image will do.
    """
    if session.dry_run and only_files:
        session.tell_of_cut_off_runs()
        host = session.host_or_image()
        print_plan(session, api.plan(host, intent), ())
        return None
    if session.dry_run:
        session.tell_of_cut_off_runs()
        host = session.host(
            with_users=True,
            with_resets=intent.needs_resets,
            with_gpu_modes=intent.needs_gpu_modes,
        )
        print_plan(session, api.plan(host, intent), not_checked(host, intent))
        return None
    session.require_live("a snapshot cannot be changed", "pass --dry-run to see the plan")
    tree = session.files if only_files else session.tree
    return api.apply(intent, tree=tree, **options_of(session))


def options_of(session: Session) -> api.Options:
    """How the changes of a session are made: notes are told, and steps to whoever watches."""
    options: api.Options = {
        "machine": session.machine,
        "on_note": note,
        "deadline": session.deadline,
    }
    if session.verbose or sys.stderr.isatty():
        options["on_step"] = tell_step
    return options


def tell_step(step: Step) -> None:
    """A line for a step as it begins."""
    note(f"  {step.describe()}")


def not_checked(host: HostSnapshot, intent: Request) -> tuple[str, ...]:
    """What a plan for this host could not look at, and what is missing for it."""
    return tuple(_not_checked(host, intent))


def _not_checked(host: HostSnapshot, intent: Request) -> Iterator[str]:
    if host.users is None:
        yield "who holds the devices: only root of a running host sees it"
        if host.host_uses is not None:
            yield "mounts in other namespaces and disks in exclusive use: requires root"
    if host.host_uses is None:
        yield "mounted file systems and the default route: this host has no /proc"
    if isinstance(intent, Bind) and intent.driver is not None and host.vfio_modules is None:
        yield f"whether there is a driver {intent.driver}: this host has no lists of modules"


def confirm(session: Session, question: str) -> None:
    """Ask a person before a guard is overridden; without a terminal the flag is the answer."""
    if session.yes or session.dry_run or not sys.stdin.isatty():
        return
    if not click.confirm(printable(question), err=True):
        message = "the guard stands: the question was not answered with yes"
        raise Refusal(message, "answer yes, or pass --yes; nothing was changed")


def print_outcome(
    session: Session, outcome: api.Outcome, lines: list[str], **facts: object
) -> None:
    """What a run did: `lines` for people, the steps and `facts` for programs."""
    plan = outcome.plan
    if session.format != "table":
        body = {"changed": outcome.is_changed, **plan_body(plan), **facts}
        print_document("Outcome", body, session.format)
        return
    for text in (*plan.notes, *plan.already):
        say(text)
    if not outcome.is_changed:
        say("nothing to do")
    for line in lines:
        say(line)


def plan_body(plan: Plan) -> dict[str, object]:
    """A plan as documents have it."""
    return {
        "summary": plan.summary,
        "notes": plan.notes,
        "already": plan.already,
        "locks": plan.locks,
        "steps": [
            {
                "description": step.describe(),
                "commands": step.commands(),
                **to_jsonable(step),
            }
            for step in plan.steps
        ],
    }


def print_plan(session: Session, plan: Plan, unseen: tuple[str, ...]) -> None:
    """What would be done, with what nobody could look at."""
    if session.format != "table":
        body = {**plan_body(plan), "not_checked": unseen}
        print_document("Plan", body, session.format)
        return
    say(f"plan: {plan.summary}")
    for text in (*plan.notes, *plan.already):
        say(f"  {text}")
    if plan.is_empty:
        say("nothing to do")
    for number, step in enumerate(plan.steps, start=1):
        say(f"{number:3}. {step.describe()}")
        for command in step.commands():
            say(f"       {command}")
    for text in plan.later:
        say(f"then: {text}")
    for text in unseen:
        note(f"not checked: {text}")
