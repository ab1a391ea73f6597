"""How a long change is followed: a bar on a terminal, a line for each step otherwise."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vfiomgr.cli.change import options_of, tell_step
from vfiomgr.cli.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress

    from vfiomgr.api import Options
    from vfiomgr.cli.session import Session
    from vfiomgr.model.plan import Plan
    from vfiomgr.model.step import Step

_BAR_WIDTH = 30
_COUNT_WIDTH = 7
"""`999/999`; counts of any length take the same room, so that nothing beside them moves."""
_UNPLANNED = "reading the host"
"""What is under way until there is a plan, whose steps can be counted."""


@contextmanager
def followed(session: Session) -> Iterator[Options]:
    """The options of a change that is told of as long as it is under way."""
    if not sys.stderr.isatty():
        yield {**options_of(session), "on_step": tell_step}
        return
    from rich.text import Text  # noqa: PLC0415 - slow to import

    with _bar() as progress:
        task = progress.add_task(_UNPLANNED, total=None, count="".rjust(_COUNT_WIDTH))
        planned, begun = 0, 0

        def plan_begins(plan: Plan) -> None:
            nonlocal planned
            planned += len(plan.steps)
            count = f"{begun}/{planned}".rjust(_COUNT_WIDTH)
            progress.update(task, total=planned or None, count=count if planned else "")

        def step_begins(step: Step) -> None:
            nonlocal begun
            text = printable(step.describe())
            print_above(f"  {text}")
            count = f"{begun}/{planned}".rjust(_COUNT_WIDTH)
            progress.update(task, completed=begun, count=count, description=text)
            begun += 1

        def print_above(text: str) -> None:
            progress.console.print(Text(printable(text)), soft_wrap=True)

        yield {
            **options_of(session),
            "on_plan": plan_begins,
            "on_step": step_begins,
            "on_note": print_above,
        }


def _bar() -> Progress:
    """Columns of fixed widths; the description has what is left of the line, and is cut there."""
    from rich.console import Console  # noqa: PLC0415 - slow to import
    from rich.progress import (  # noqa: PLC0415
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
        console=Console(stderr=True),
        transient=True,
        expand=True,
    )
