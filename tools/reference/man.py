"""Manual pages in roff (man(7)), from the same pages as docs/reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from vfiomgr import __version__

if TYPE_CHECKING:
    from tools.reference.pages import Page

SECTION = "1"
_SPECIAL = {
    "\\": "\\(rs",
    "-": "\\-",
    "'": "\\(aq",
    '"': "\\(dq",
    "`": "\\(ga",
    "^": "\\(ha",
    "~": "\\(ti",
}
"""Characters that roff or its output devices would read or draw as something else."""


class _Roff(str):
    """Text that is escaped already."""

    __slots__ = ()


def escaped(text: str) -> _Roff:
    """Text for any place of a page: no character of it acts, and no line is a request."""
    found = "".join(_SPECIAL.get(char) or _plain(char) for char in text)
    return _Roff("\n".join(f"\\&{line}" if line[:1] == "." else line for line in found.split("\n")))


def _plain(char: str) -> str:
    return char if char.isascii() else f"\\[u{ord(char):04X}]"


def filled(text: str) -> _Roff:
    """A paragraph: what is in backticks is typed, so it is bold."""
    parts = map(escaped, text.split("`"))
    return _Roff("".join(f"\\fB{part}\\fP" if n % 2 else part for n, part in enumerate(parts)))


def term(text: str) -> _Roff:
    """An option or a usage line: words to type are bold, what stands for a value is italic."""
    parts = re.split(r"([\s,\[\]|:=]+)", text)
    return _Roff("".join(map(_word, parts)))


def _word(word: str) -> str:
    if re.fullmatch(r"[A-Z_]{2,}(\.\.\.)?", word):
        return f"\\fI{escaped(word)}\\fP"
    return f"\\fB{escaped(word)}\\fP" if re.match(r"-|[a-z]", word) else escaped(word)


def render(page: Page, date: str, related: tuple[str, ...]) -> str:
    """The page of a command; `related` are the names of other pages."""
    template = _environment().get_template("man.j2")
    return template.render(
        page=page, date=_Roff(date), version=__version__, section=SECTION, related=related
    )


def _environment() -> Environment:
    """Escapes each text that a template prints, unless a filter has done it."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # noqa: S701 - roff, and not HTML: finalize escapes it
        finalize=lambda value: value if isinstance(value, _Roff) else escaped(str(value)),
    )
    environment.filters |= {"filled": filled, "term": term}
    return environment


def related_pages(page: Page, pages: tuple[Page, ...]) -> tuple[str, ...]:
    """The names of the parent's page, and of those below."""
    parents = [one.name for one in pages if one.path == page.path[:-1]]
    return (*parents, *(one.name for one in pages if one.path[:-1] == page.path))
