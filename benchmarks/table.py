"""What was measured, as one table: seconds, ratios, and the budgets that they must keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def time(seconds: float) -> str:
    """Seconds as text."""
    if seconds < 0.001:  # noqa: PLR2004 - a millisecond
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def mebibytes(size: float) -> str:
    """Bytes as text."""
    return f"{size / 2**20:.1f} MiB"


@dataclass(frozen=True)
class Row:
    """One comparison: two times in seconds, and how many times the other one ours may be.

    Sizes in bytes are compared in the same way, if they are `shown` as such.
    """

    what: str
    ours: float
    other: str
    theirs: float
    budget: float | None = None
    shown: Callable[[float], str] = time

    @property
    def ratio(self) -> float:
        """Our time, the other's being one."""
        return self.ours / self.theirs

    @property
    def is_kept(self) -> bool:
        """Whether the budget, where there is one, is kept; a difference below zero is noise."""
        return self.budget is None or 0 < self.ratio <= self.budget

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text."""
        budget = "" if self.budget is None else f"{self.budget:.2f}"
        return (
            self.what,
            self.shown(self.ours),
            self.other,
            self.shown(self.theirs),
            f"{self.ratio:.2f}",
            budget,
            "" if self.is_kept else "exceeded",
        )


_HEADINGS = ("WHAT", "TIME", "AGAINST", "TIME", "RATIO", "BUDGET", "")


def render(rows: list[Row]) -> str:
    """The table."""
    lines = [_HEADINGS, *(row.cells for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
