"""The picture of a host: as text, as an SVG, and as an HTML file that loads nothing.

The HTML is an ARIA tree with a search; the SVG has boxes from left to right, inside their NUMA
nodes and root complexes.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import click

from vfiomgr.documents.text import resource_directory
from vfiomgr.topology.model import Item, Row, Topology, facts_text, rows, summary, wrap

if TYPE_CHECKING:
    from jinja2 import Environment


HUES = tuple(number * 150 % 360 for number in range(12))
"""Degrees; neighbours in the list differ much. Groups beyond the twelfth share colours."""


def colours_of(rows: Iterable[Row]) -> dict[int, int]:
    """The colour of each IOMMU group as a place in `HUES`, in the order in which they appear."""
    groups = (row.item.group for row in rows if row.item.group is not None)
    return {group: place % len(HUES) for place, group in enumerate(dict.fromkeys(groups))}


def render(name: str, **values: object) -> str:
    """A template of templates/topology; every value is escaped."""
    return _environment().get_template(name).render(values)


def asset(name: str) -> str:
    """A file that stands in a document as it is."""
    with open(f"{resource_directory('templates')}/topology/{name}", encoding="utf-8") as file:
        return file.read()


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # noqa: PLC0415 - slow

    return Environment(
        loader=FileSystemLoader(f"{resource_directory('templates')}/topology"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


_LEAST_WIDTH = 30
"""Columns for text, however deep the tree and narrow the terminal."""
_TERMINAL_COLOURS = {"error": "red", "warning": "yellow"}


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
        colour = _TERMINAL_COLOURS.get(problem.severity)
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


_CHARACTER, _LINE = 7.3, 16
"""Pixels of a character and of a line, in a monospaced font of 12 pixels."""
_MOST_CHARACTERS = 40
_PADDING, _GAP, _BETWEEN = 8, 8, 36
"""Inside of boxes, between boxes of a column, and between columns."""
_HEAD = 26
"""Height of the heading of a frame."""
_FRAMED = frozenset({"host", "numa-node", "root-complex"})


class _Line(NamedTuple):
    kind: str
    text: str
    y: int


class _Box(NamedTuple):
    item: Item
    x: int
    y: int
    width: int
    height: int
    lines: tuple[_Line, ...]
    worst: str


class _Frame(NamedTuple):
    item: Item
    x: int
    y: int
    width: int
    height: int
    heading: str
    problems: str


class _Edge(NamedTuple):
    x: int
    y: int
    middle: int
    to_x: int
    to_y: int


class _Drawing:
    """Boxes are put down from the top; a box stands at the height of its first child."""

    def __init__(self, root: Item, *, unfold: bool) -> None:
        self._unfold = unfold
        self.boxes: list[_Box] = []
        self.frames: list[_Frame] = []
        self.edges: list[_Edge] = []
        self._widths: dict[int, int] = {}
        self._widest_heading = 0
        self._measure(root, 0)
        self.height = self._frame(root, _GAP, _GAP) + _GAP
        self.width = max([frame.x + frame.width for frame in self.frames]) + _GAP

    def _measure(self, item: Item, column: int) -> None:
        """How wide the columns are; frames stand in none."""
        is_frame = item.kind in _FRAMED and column == 0
        if is_frame:
            width = round(len(_heading(item)) * _CHARACTER) + 8 * _PADDING
            self._widest_heading = max(width, self._widest_heading)
        else:
            widest = max(len(text) for _, text in _texts(item))
            width = round(widest * _CHARACTER) + 2 * _PADDING
            self._widths[column] = max(width, self._widths.get(column, 0))
        for child in item.shown(unfold=self._unfold):
            self._measure(child, column if is_frame else column + 1)

    def _x(self, column: int) -> int:
        return 4 * _PADDING + sum(self._widths[n] + _BETWEEN for n in range(column))

    def _frame(self, item: Item, x: int, y: int) -> int:
        """Draw a frame with what is in it; where it ends."""
        place = len(self.frames)
        frame = _Frame(item, x, y, 0, 0, _heading(item), _worst(item))
        self.frames.append(frame)
        bottom = y + _HEAD
        for child in item.shown(unfold=self._unfold):
            if child.kind in _FRAMED:
                bottom = self._frame(child, x + _PADDING, bottom) + _GAP
            else:
                bottom = self._box(child, 0, bottom)[1] + _GAP
        right = max(self._x(len(self._widths)) - _BETWEEN + 4 * _PADDING, self._widest_heading)
        self.frames[place] = frame._replace(width=right - 2 * x, height=bottom - y)
        return bottom

    def _box(self, item: Item, column: int, y: int) -> tuple[_Box, int]:
        """Draw a box with all to the right of it; where that ends."""
        x, width = self._x(column), self._widths[column]
        lines = tuple(
            _Line(kind, text, y + _PADDING + _LINE * number + 11)
            for number, (kind, text) in enumerate(_texts(item))
        )
        height = _LINE * len(lines) + 2 * _PADDING
        box = _Box(item, x, y, width, height, lines, _worst(item))
        self.boxes.append(box)
        bottom = y
        for child in item.shown(unfold=self._unfold):
            drawn, end = self._box(child, column + 1, bottom)
            start = x + width
            middle = start + _BETWEEN // 2
            level = y + _PADDING + _LINE // 2
            to = drawn.y + _PADDING + _LINE // 2
            self.edges.append(_Edge(start, level, middle, drawn.x, to))
            bottom = end + _GAP
        return box, max(y + height, bottom - _GAP)


def render_svg(topology: Topology, root: Item, *, unfold: bool = False) -> str:
    """A picture in light or dark, as its reader prefers."""
    drawing = _Drawing(root, unfold=unfold)
    return render(
        "topology.svg.j2",
        summary=summary(topology, root),
        drawing=drawing,
        hues=HUES,
        colours=colours_of(rows(root, unfold=unfold)),
    )


def _worst(item: Item) -> str:
    found = {problem.severity for problem in item.problems}
    return next((name for name in ("error", "warning") if name in found), "")


def _heading(item: Item) -> str:
    problems = (f"! {problem.text}" for problem in item.problems)
    return "  ".join(filter(None, (item.title, item.name, ", ".join(item.facts), *problems)))


def _texts(item: Item) -> Iterator[tuple[str, str]]:
    """The lines of a box, each with the class that styles it."""
    texts = [("title", item.title), ("name", item.name), ("fact", facts_text(item))]
    if item.users:
        texts.append(("fact", f"in use: {item.users}"))
    for problem in item.problems:
        is_remark = problem.severity == "info"
        marked = ("fact", problem.text) if is_remark else (problem.severity, f"! {problem.text}")
        texts.append(marked)
    for kind, text in texts:
        yield from ((kind, line) for line in wrap(text, _MOST_CHARACTERS))


def render_html(topology: Topology, root: Item, *, unfold: bool = False) -> str:
    """All items; what is folded can be opened there, and is open with `unfold`.

    The content security policy names the style and the script by their digests, so that nothing
    else could run, not even if a name of the host became markup.
    """
    from markupsafe import Markup  # noqa: PLC0415 - as jinja2

    found = list(rows(root, unfold=True))
    levels = range(1, max(row.depth for row in found) + 2)
    style = asset("topology.css") + "".join(
        (
            *(f'[aria-level="{level}"] {{ --level: {level}; }}\n' for level in levels),
            *(f".c{place} {{ --hue: {hue}; }}\n" for place, hue in enumerate(HUES)),
        )
    )
    script = asset("topology.js")
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return render(
        "topology.html.j2",
        policy=policy,
        style=Markup(style),  # noqa: S704 - ours
        script=Markup(script),  # noqa: S704 - ours
        summary=summary(topology, root),
        rows=found,
        colours=colours_of(found),
        unfold=unfold,
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
