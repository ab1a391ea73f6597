"""Tables as lines of text, at the width of a terminal or at their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

from vfiomgr.value import Value

if TYPE_CHECKING:
    Manner = Literal["whole", "cut", "wrap"]

_GAP = 2
_LEAST = 13
"""Of wrapped columns: an address with a comma is not broken."""
_INDENT = 4
"""Of the columns below a row, where there is no room for them right of the first column."""
_READABLE: tuple[tuple[Manner, int], ...] = (("cut", 24), ("wrap", 24))
"""Which columns become narrower where a table does not fit, and down to which width."""
_GENTLY: tuple[tuple[Manner, int], ...] = (("cut", 16), ("wrap", 24))
_AT_MOST: tuple[tuple[Manner, int], ...] = (*_GENTLY, ("cut", 8), ("wrap", _LEAST))
_NOTHING = ("", "-")
_TYPICAL = 0.8
"""The part of the cells of a column that its width suits at least."""
_OUTLIER = 12
"""How much longer a cell is for which a column is not made as wide: a UUID among addresses."""


class Column(Value):
    """A column of a table, and what happens to it where the terminal is too narrow.

    `whole`: its cells are never cut, such as those that are typed into commands, and numbers.
    `cut`: they end in an ellipsis. `wrap`: they are wrapped; those of the last column stand below
    their rows where little space is left beside them.
    """

    heading: str
    manner: Manner = "whole"


def cut(heading: str) -> Column:
    """A column of names that are cut on a narrow terminal."""
    return Column(heading, "cut")


def wrapped(heading: str) -> Column:
    """A column of notes that are wrapped on a narrow terminal."""
    return Column(heading, "wrap")


class Lines(Value):
    """A table as text."""

    headings: tuple[str, ...]
    """Several lines where a heading does not fit beside the next one, none without headings."""
    body: tuple[str, ...]


def lines_of(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    *,
    width: int | None = None,
    with_headings: bool = True,
    ellipsis: str = "…",
) -> Lines:
    """Align the cells of a table; with a `width`, make it fit where its fixed columns allow it."""
    headings = [[column.heading for column in columns]] if with_headings else []
    if not (headings or rows):
        return Lines((), ())
    natural = [max(map(_width, cells)) for cells in zip(*headings, *rows, strict=True)]
    form = _form(columns, rows, natural, width, ellipsis)
    return Lines(
        tuple(line for row in headings for line in form.lines(row)),
        tuple(line for row in rows for line in form.lines(row)),
    )


def _form(
    columns: Sequence[Column],
    rows: Sequence[Sequence[str]],
    natural: list[int],
    width: int | None,
    ellipsis: str,
) -> _Form:
    """As many columns beside each other as fit; the others below their rows."""
    if width is None:
        return _Form(columns, natural, (), (), ellipsis)
    typical = _typical_widths(columns, rows, natural)
    for wanted, steps in ((natural, _READABLE), (typical, _READABLE), (natural, _GENTLY)):
        widths = _narrowed(columns, wanted, width, steps)
        if _total(widths) <= width and _ends(columns, widths, natural) <= width:
            return _Form(columns, widths, (), (), ellipsis)
    count = max(1, len(columns) - (columns[-1].manner == "wrap"))
    widths = _fitted(columns[:count], rows, natural[:count], width)
    while _total(widths) > width and count > 1:
        count -= 1
        widths = _fitted(columns[:count], rows, natural[:count], width)
    below = columns[count:]
    indent = widths[0] + _GAP
    if below and _total(natural[count:-1]) + _GAP + _LEAST > width - indent:
        indent = _INDENT
    room = max(_LEAST, width - indent)
    cells_below = [row[count:] for row in rows]
    return _Form(
        columns[:count],
        widths,
        below,
        _fitted(below, cells_below, natural[count:], room),
        ellipsis,
        indent,
    )


class _Form(Value):
    """How the rows of a table are laid out."""

    columns: Sequence[Column]
    """Those beside each other."""
    widths: Sequence[int]
    below: Sequence[Column]
    """Those on a line of their own, below the others."""
    widths_below: Sequence[int]
    ellipsis: str
    indent: int = 0
    """Of the line below."""

    def lines(self, row: Sequence[str]) -> Iterator[str]:
        """The lines of a row."""
        count = len(self.columns)
        yield from self._lines(self.columns, self.widths, row[:count])
        if any(cell not in _NOTHING for cell in row[count:]):
            for line in self._lines(self.below, self.widths_below, row[count:]):
                yield " " * self.indent + line

    def _lines(
        self, columns: Sequence[Column], widths: Sequence[int], row: Sequence[str]
    ) -> Iterator[str]:
        """Cells beside each other; after a cell that is too long they continue on the next line."""
        cells = [
            _parts(cell, column.manner, width, self.ellipsis)
            for cell, column, width in zip(row, columns, widths, strict=True)
        ]
        for number in range(max(map(len, cells))):
            line, start = "", 0
            for parts, width in zip(cells, widths, strict=True):
                part = parts[number] if number < len(parts) else ""
                if part and line and _width(line) > start - _GAP:
                    yield line
                    line = ""
                if part:
                    line += " " * (start - _width(line)) + part
                start += width + _GAP
            yield line


def _fitted(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], natural: list[int], width: int
) -> list[int]:
    """The widths of columns on a terminal; too wide together only where fixed columns are."""
    widths = _narrowed(columns, natural, width, _AT_MOST)
    if _total(widths) <= width:
        return widths
    other = _narrowed(columns, _typical_widths(columns, rows, natural), width, _AT_MOST)
    return other if _total(other) <= width else widths


def _typical_widths(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], natural: Sequence[int]
) -> list[int]:
    """The widths of columns without the outliers of fixed ones."""
    return [
        _typical(column, [row[place] for row in rows], natural[place])
        for place, column in enumerate(columns)
    ]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _ends(columns: Sequence[Column], widths: Sequence[int], natural: Sequence[int]) -> int:
    """Where the longest cell of a fixed column ends, wherever its column begins."""
    starts = [0, *accumulate(each + _GAP for each in widths)]
    fixed = [place for place, column in enumerate(columns) if column.manner == "whole"]
    return max((starts[place] + natural[place] for place in fixed), default=0)


def _narrowed(
    columns: Sequence[Column],
    natural: Sequence[int],
    width: int,
    steps: Sequence[tuple[Manner, int]],
) -> list[int]:
    """Take what is too much from the columns that give way, the widest first."""
    widths = list(natural)
    for manner, least in steps:
        places = [place for place, column in enumerate(columns) if column.manner == manner]
        for place in sorted(places, key=lambda place: -widths[place]):
            excess = _total(widths) - width
            floor = max(least, _width(columns[place].heading))
            widths[place] -= max(0, min(excess, widths[place] - floor))
    return widths


def _typical(column: Column, cells: Sequence[str], natural: int) -> int:
    """The width of a fixed column without its outliers."""
    if column.manner != "whole" or not cells:
        return natural
    lengths = sorted(map(_width, cells))
    typical = max(_width(column.heading), lengths[int((len(lengths) - 1) * _TYPICAL)])
    return typical if natural >= typical + _OUTLIER else natural


def _parts(cell: str, manner: Manner, width: int, ellipsis: str) -> Sequence[str]:
    """A cell as the lines that it takes in a column."""
    if manner == "whole" or _width(cell) <= width:
        return (cell,)
    if manner == "cut":
        return (_cut(cell, width - _width(ellipsis)).rstrip() + ellipsis,)
    narrow = width if _width(cell) == len(cell) else width // 2
    import textwrap  # noqa: PLC0415 - slow to import

    return textwrap.wrap(cell, narrow, break_on_hyphens=False)


def _cut(text: str, width: int) -> str:
    """As much of the beginning of a text as fits."""
    text = text[:width]
    while _width(text) > width:
        text = text[:-1]
    return text


def _width(text: str) -> int:
    """The columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # noqa: PLC0415 - slow, and few names need it

    return cell_len(text)
