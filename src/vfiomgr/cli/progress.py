"""Progress of a change on a terminal: a spinner with text, then a bar once steps are counted."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from vfiomgr.documents.printable import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.progress import Progress

    from vfiomgr.engine.plan import Plan
    from vfiomgr.engine.step import Step
    from vfiomgr.library import Reports

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
