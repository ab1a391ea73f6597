"""The picture as a tree of text, for a terminal or a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import click

from vfiomgr.topology.view import facts_text, rows, wrap

if TYPE_CHECKING:
    from vfiomgr.topology.view import Item, Row

_LEAST_WIDTH = 30
"""Columns for text, however deep the tree and narrow the terminal."""
_COLOURS = {"error": "red", "warning": "yellow"}


class Glyphs(NamedTuple):
    """What branches are drawn with, each of the same width."""

    branch: str
    last: str
    down: str
    blank: str = "   "


BOXES = Glyphs("├─ ", "└─ ", "│  ")
ASCII = Glyphs("|- ", "`- ", "|  ")


def render_text(
    root: Item,
    *,
    unfold: bool = False,
    glyphs: Glyphs = BOXES,
    width: int | None = None,
    has_colours: bool = False,
) -> str:
    """The tree, a line for each item and for each problem; wrapped where there is a `width`."""
    lines: list[str] = []
    for row in rows(root, unfold=unfold):
        lines += _lines(row, glyphs, width, has_colours=has_colours)
    return "".join(f"{line}\n" for line in lines)


def _lines(row: Row, glyphs: Glyphs, width: int | None, *, has_colours: bool) -> list[str]:
    item = row.item
    above = "".join(glyphs.down if goes_on else glyphs.blank for goes_on in row.guides)
    goes_on = row.position < row.siblings
    first = above + (glyphs.branch if goes_on else glyphs.last) if row.depth else ""
    later = above + (glyphs.down if goes_on else glyphs.blank) if row.depth else ""
    later += glyphs.down if row.is_open else glyphs.blank
    room = None if width is None else max(width - len(later), _LEAST_WIDTH)
    line, *more = _wrapped(_sentence(item), room)
    if has_colours and line.startswith(item.title):
        line = click.style(item.title, bold=True) + line.removeprefix(item.title)
    lines = [first + line, *(later + text for text in more)]
    for problem in item.problems:
        colour = _COLOURS.get(problem.severity)
        texts = _wrapped(f"! {problem.text}", room) if colour else []
        lines += [later + (click.style(text, fg=colour) if has_colours else text) for text in texts]
    return [text.rstrip() for text in lines]


def _sentence(item: Item) -> str:
    remarks = [problem.text for problem in item.problems if problem.severity == "info"]
    users = [f"in use: {item.users}"] if item.users else []
    about = ", ".join(filter(None, (facts_text(item), *remarks, *users)))
    return "  ".join(filter(None, (item.title, item.name, about)))


def _wrapped(text: str, room: int | None) -> list[str]:
    return wrap(text, len(text) if room is None else room)
