"""The pages in docs/reference, in Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tools.reference.pages import Entry, Page

_NOTE = "<!-- Generated from the command by `python -m tools.reference`. -->"


def render(page: Page) -> str:
    """The text of a page."""
    return "\n\n".join(_blocks(page)) + "\n"


def cell(text: str) -> str:
    """A text in a cell of a table, where lines and bars would end it."""
    return " ".join(text.split()).replace("|", "\\|")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose cells are Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _blocks(page: Page) -> Iterator[str]:
    yield f"# {page.command}"
    yield _NOTE
    yield _inline(page.summary)
    yield f"```text\n{page.usage}\n```"
    for part in page.description:
        yield f"```text\n{part.text}\n```" if part.is_verbatim else _inline(part.text)
    if page.examples:
        yield f"## Examples\n\n```sh\n{page.examples}\n```"
    if page.commands:
        yield "## Commands"
        rows = [(_link(page, entry), cell(_inline(entry.text))) for entry in page.commands]
        yield table(("command", "what it does"), rows)
    yield "## Options"
    yield _entries("option", page.options)
    if page.variables:
        yield f"## Environment\n\n{_entries('variable', page.variables)}"
    if page.exit_status:
        yield f"## Exit status\n\n{_inline(page.exit_status)}"
    parents = page.path[:-1]
    if parents:
        yield f"Part of [{' '.join(parents)}]({'-'.join(parents)}.md)."


def _entries(heading: str, entries: Sequence[Entry]) -> str:
    rows = [(f"`{cell(entry.term)}`", cell(_inline(entry.text))) for entry in entries]
    return table((heading, "meaning"), rows)


def _link(page: Page, entry: Entry) -> str:
    return f"[`{entry.term}`]({page.name}-{entry.term}.md)"


def _inline(text: str) -> str:
    """Text of `--help`, in which < and * mean themselves; what is in backticks stays."""
    parts = text.split("`")
    for number in range(0, len(parts), 2):
        for special in "\\*<":
            parts[number] = parts[number].replace(special, f"\\{special}")
    return "`".join(parts)
