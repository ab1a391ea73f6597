"""The picture as an SVG: boxes from left to right, inside their NUMA nodes and root complexes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vfiomgr.topology.render.templates import HUES, colours_of, render
from vfiomgr.topology.view import facts_text, rows, summary, wrap

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.topology.model import Topology
    from vfiomgr.topology.view import Item

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
    yield from (("title", text) for text in _wrapped(item.title))
    yield from (("name", text) for text in _wrapped(item.name))
    yield from (("fact", text) for text in _wrapped(facts_text(item)))
    if item.users:
        yield from (("fact", text) for text in _wrapped(f"in use: {item.users}"))
    for problem in item.problems:
        marked = problem.text if problem.severity == "info" else f"! {problem.text}"
        kind = "fact" if problem.severity == "info" else problem.severity
        yield from ((kind, text) for text in _wrapped(marked))


def _wrapped(text: str) -> list[str]:
    return wrap(text, _MOST_CHARACTERS)
