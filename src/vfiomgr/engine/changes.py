"""Shared by commands that change the host: plan or apply a request, and print the result."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Unpack

import click

from vfiomgr.cli.options import flag
from vfiomgr.cli.output import note, print_document, say
from vfiomgr.diagnostic import refuse
from vfiomgr.documents.text import printable
from vfiomgr.engine.host import ManagedHost, NamedRequest, Reports

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.status import Status

    from vfiomgr.engine.plan import Plan, Request, Step
    from vfiomgr.engine.run import Outcome
    from vfiomgr.snapshot.session import Session


_BAR_WIDTH = 30
_COUNT_WIDTH = 7
"""`999/999`; counts of any length get the same space, so that nothing beside them moves."""
_UNPLANNED = "reading the host"
"""Shown until there is a plan, whose steps can be counted."""


@contextmanager
def shown_progress() -> Iterator[Reports]:
    """Show progress on stderr, a terminal, based on the reports."""
    from rich.console import Console  # noqa: PLC0415 - slow to import

    shown = _Shown(Console(stderr=True))
    try:
        yield {"on_plan": shown.plan, "on_step": shown.step, "on_note": shown.note}
    finally:
        shown.end()


@contextmanager
def shown_wait(text: str) -> Iterator[Wait]:
    """Show on stderr, if it is a terminal, that the command waits."""
    wait = Wait(text)
    try:
        yield wait
    finally:
        wait.end()


class Wait:
    """A spinner with a text while a command waits for events; no spinner without a terminal."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._spinner: Status | None = None
        if sys.stderr.isatty():
            from rich.console import Console  # noqa: PLC0415 - slow to import

            self._spinner = Console(stderr=True).status("")
            self._show(text)
            self._spinner.start()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Remove the spinner for a moment, so that lines can be printed."""
        if self._spinner is not None:
            self._spinner.stop()
        try:
            yield
        finally:
            if self._spinner is not None:
                self._show(self._text)
                self._spinner.start()

    def tell_step(self, step: Step) -> None:
        """Show a step as it begins."""
        self._show(step.describe())

    def _show(self, text: str) -> None:
        from rich.text import Text  # noqa: PLC0415 - slow to import

        if self._spinner is not None:
            self._spinner.update(Text(printable(text)))

    def end(self) -> None:
        """Remove the spinner."""
        if self._spinner is not None:
            self._spinner.stop()


class _Shown:
    """The spinner until steps are counted, then the bar; lines appear above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner = console.status(_UNPLANNED)
        self._spinner.start()
        self._bar = _bar(console)
        self._task = self._bar.add_task("", total=None, count="")
        self._planned = self._begun = 0

    def plan(self, plan: Plan) -> None:
        """Count the steps of a plan, with those of earlier ones."""
        self._planned += len(plan.steps)
        if self._planned:
            self._spinner.stop()
            self._update(self._begun)
            self._bar.start()

    def step(self, step: Step) -> None:
        """Show a step that begins, after all previous ones are done."""
        text = printable(step.describe())
        self.note(f"  {text}")
        self._update(self._begun, text)
        self._begun += 1

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        from rich.text import Text  # noqa: PLC0415 - slow to import

        self._console.print(Text(printable(text)), soft_wrap=True)

    def end(self) -> None:
        """Remove the bar and keep the lines."""
        self._spinner.stop()
        self._bar.stop()

    def _update(self, done: int, text: str | None = None) -> None:
        count = f"{done}/{self._planned}".rjust(_COUNT_WIDTH)
        self._bar.update(
            self._task, total=self._planned, completed=done, count=count, description=text
        )


def _bar(console: Console) -> Progress:
    """Columns of fixed width; the description gets the rest of the line and is cut off there."""
    from rich.progress import (  # noqa: PLC0415 - slow to import
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )
    from rich.table import Column  # noqa: PLC0415

    fixed, rest = Column(no_wrap=True, min_width=_COUNT_WIDTH), Column(no_wrap=True, ratio=1)
    return Progress(
        SpinnerColumn(),
        BarColumn(bar_width=_BAR_WIDTH, table_column=Column(min_width=_BAR_WIDTH)),
        TextColumn("{task.fields[count]}", markup=False, table_column=fixed),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False, table_column=rest),
        console=console,
        transient=True,
        expand=True,
    )


update_initramfs_option = flag(
    "--update-initramfs", text="Rebuild the initramfs if its udev rules change."
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


def change(
    session: Session, request: Request | NamedRequest, *, only_files: bool = False
) -> Outcome | None:
    """Apply a request and print the result, or with --dry-run its plan."""
    outcome = plan_or_apply(session, request, only_files=only_files)
    if outcome is not None:
        print_outcome(session, outcome)
    return outcome


@contextmanager
def followed(session: Session, *, tells_steps: bool = True) -> Iterator[ManagedHost]:
    """The host of a session, whose changes are shown as long as they are under way.

    A terminal shows a bar; elsewhere each step is a line where it `tells_steps`.
    """
    if not sys.stderr.isatty():
        yield host_of(session, on_step=tell_step if tells_steps else None)
        return
    with shown_progress() as reports:
        yield host_of(session, **reports)


def host_of(session: Session, **reports: Unpack[Reports]) -> ManagedHost:
    """The host of a session; steps are printed on a terminal and with -v."""
    is_watched = session.verbose or sys.stderr.isatty()
    usual: Reports = {"on_note": note, "on_step": tell_step if is_watched else None}
    usual.update(reports)
    host = ManagedHost(deadline=session.timeout, **usual)
    session.share_with(host)
    return host


def tell_step(step: Step) -> None:
    """Print a step as it begins."""
    note(f"  {step.describe()}")


def can_ask(session: Session) -> bool:
    """Whether a person answers questions."""
    return not (session.yes or session.dry_run) and sys.stdin.isatty()


def confirm(
    session: Session, question: str, what: str = "the override of the safety check"
) -> None:
    """Ask before a safety check is overridden; without a terminal, the option is sufficient."""
    if can_ask(session) and not click.confirm(printable(question), err=True):
        message = f"cannot continue: {what} was not confirmed"
        refuse("not-confirmed", "", message, "nothing was changed; answer yes, or pass --yes")


def print_outcome(
    session: Session, outcome: Outcome, lines: Iterable[str] | None = None, **facts: object
) -> None:
    """Print the result of a change: `lines` for people, steps and `facts` for programs.

    Without `lines`, people read the steps.
    """
    plan = outcome.plan
    if session.format != "table":
        body = {"changed": outcome.is_changed, **plan.to_document(), "notes": plan.notes, **facts}
        print_document("Outcome", body, session.format)
        return
    if lines is None:
        lines = (step.report() for step in plan.steps) if outcome.is_changed else ()
    nothing = () if outcome.is_changed else ("nothing to do",)
    say(*plan.notes, *plan.already, *nothing, *lines)


def print_plan(session: Session, plan: Plan) -> None:
    """Print a plan, and what could not be checked."""
    if session.format != "table":
        body = {**plan.to_document(), "not_checked": plan.not_checked}
        print_document("Plan", body, session.format)
        return
    say(*plan.lines())
    for text in plan.not_checked:
        note(f"not checked: {text}")
