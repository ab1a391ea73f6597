"""How a long change is followed: a bar on a terminal, a line for each step otherwise."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vfiomgr.cli.change import options_of, tell_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.api import Options
    from vfiomgr.cli.session import Session
    from vfiomgr.model.plan import Plan
    from vfiomgr.model.step import Step


@contextmanager
def followed(session: Session) -> Iterator[Options]:
    """The options of a change that is told of as long as it is under way."""
    if not sys.stderr.isatty():
        yield {**options_of(session), "on_step": tell_step}
        return
    from rich.console import Console  # noqa: PLC0415 - slow to import
    from rich.markup import escape  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    progress = Progress(
        SpinnerColumn(),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        transient=True,
    )
    with progress:
        task = progress.add_task("", total=0)
        begun = 0

        def plan_begins(plan: Plan) -> None:
            progress.update(task, total=(progress.tasks[0].total or 0) + len(plan.steps))

        def step_begins(step: Step) -> None:
            nonlocal begun
            text = escape(step.describe())
            progress.console.print(f"  {text}", highlight=False)
            progress.update(task, completed=begun, description=text)
            begun += 1

        def note_above(text: str) -> None:
            progress.console.print(escape(text), highlight=False)

        yield {
            **options_of(session),
            "on_plan": plan_begins,
            "on_step": step_begins,
            "on_note": note_above,
        }
