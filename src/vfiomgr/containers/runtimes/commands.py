"""`vfiomgr runtime …`: its group, and what its commands share."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from vfiomgr.cli.options import LazyGroup, declared, with_options
from vfiomgr.cli.output import note, print_document, say, say_text
from vfiomgr.containers.runtimes.model import PROGRAMS
from vfiomgr.containers.runtimes.named import EntryChange, EntryOutcome, EntryPlan, PlaceOptions
from vfiomgr.engine.changes import print_outcome

if TYPE_CHECKING:
    from vfiomgr.snapshot.session import Session


def place_options(default: str) -> Callable[[Any], Any]:
    """The options that select the container runtime; the help of --runtime names the default."""
    program = click.option(
        "--runtime",
        "program",
        type=click.Choice(PROGRAMS),
        help=f"Use this container runtime.  [default: {default}]",
    )
    return lambda function: with_options(function, program, declared(PlaceOptions))


def at_place(session: Session, program: str | None, runtime_config: str | None) -> str:
    """The options that select the same place in another command."""
    root = session.root if session.root.strip("/") else None
    told = {"--root": root, "--runtime": program, "--runtime-config": runtime_config}
    return "".join(f" {option} {shlex.quote(value)}" for option, value in told.items() if value)


def carry_out(session: Session, change: EntryChange, undo: str = "") -> None:
    """Apply the change and print what to do next; with --dry-run, print the plan."""
    if session.dry_run:
        _print_plan(session, change.plan())
        return
    done = change.apply()
    outcome = done.outcome
    facts: dict[str, object] = {"not_checked": done.not_checked}
    if outcome.is_changed:
        facts["backups"] = done.backups
        facts["restart"] = done.restart
    print_outcome(session, outcome, None, **facts)
    if session.format == "table":
        for text in _further(done, undo):
            note(text)


def _further(done: EntryOutcome, undo: str) -> Iterator[str]:
    for text in done.not_checked:
        yield f"not checked: {text}"
    if not done.outcome.is_changed:
        return
    for path in done.backups:
        yield f"backup: {path}"
    yield f"restart {done.program} to apply the change: {done.restart}"
    if undo:
        yield f"undo with: {undo}"


def _print_plan(session: Session, found: EntryPlan) -> None:
    plan = found.plan
    if session.format != "table":
        body = {
            **plan.to_document(),
            "not_checked": found.not_checked,
            "differences": found.differences,
        }
        print_document("Plan", body, session.format)
        return
    say(f"plan: {plan.summary}")
    for text in (*plan.notes, *plan.already):
        say(f"  {text}")
    if plan.is_empty:
        say("nothing to do")
    for number, step in enumerate(plan.steps, start=1):
        say(f"{number:3}. {step.describe()}")
    for text in found.differences.values():
        say_text(text)
    for text in found.not_checked:
        note(f"not checked: {text}")


_COMMANDS = {
    "install": ("vfiomgr.kata.commands", "install"),
    "uninstall": ("vfiomgr.kata.commands", "uninstall"),
}


@click.group("runtime", cls=LazyGroup, table=_COMMANDS)
def runtime() -> None:
    """Install Kata and OCI runtimes in containerd, CRI-O or Docker.

    \b
    Examples:
      vfiomgr runtime install --kata
      vfiomgr runtime install nvidia --path /usr/bin/nvidia-container-runtime
      vfiomgr runtime uninstall kata-vfio
    """
