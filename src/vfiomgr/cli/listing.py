"""How lists are shown: as addresses alone, or as tables with columns that can be chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from vfiomgr.cli.options import Options, with_options
from vfiomgr.cli.output import print_table, say
from vfiomgr.errors import UsageError, forbid_together

if TYPE_CHECKING:
    from vfiomgr.cli.table import Column


class View(NamedTuple):
    """How a list is shown: as addresses alone, or as a table with some columns."""

    columns: tuple[str, ...]
    """Headings that were asked for; empty for the usual ones."""
    names_only: bool
    with_headings: bool

    def needs(self, heading: str, usual: Sequence[str]) -> bool:
        """Whether a column is shown."""
        return not self.names_only and heading in (self.columns or usual)

    def print(
        self,
        known: Sequence[Column],
        rows: Sequence[Sequence[str]],
        usual: Sequence[str],
    ) -> None:
        """Show a table."""
        places = {column.heading: place for place, column in enumerate(known)}
        chosen = [places[heading] for heading in self.columns or usual]
        print_table(
            [known[place] for place in chosen],
            [[row[place] for place in chosen] for row in rows],
            with_headings=self.with_headings,
        )


PLAIN_VIEW = View((), names_only=False, with_headings=True)
"""What a list is without options."""


def print_names(names: Sequence[object]) -> None:
    """Addresses alone, each once."""
    say(*dict.fromkeys(map(str, names)))


def view_options(known: Sequence[Column]) -> Callable[[Any], Any]:
    """Decorate a command with the options of a view, which it takes as `view`.

    It shows tables of the columns that are `known`.
    """
    headings = [_typed(column.heading) for column in known]

    def complete(
        _context: click.Context, _parameter: click.Parameter, incomplete: str
    ) -> list[str]:
        before, comma, _ = incomplete.rpartition(",")
        names = (before + comma + name for name in headings if name not in before.split(","))
        return [name for name in names if name.startswith(incomplete)]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        def with_view(
            *arguments: object,
            columns: str | None,
            names: str | None,
            headings: bool,
            **options: object,
        ) -> object:
            form = click.get_current_context().ensure_object(Options).format
            if columns is not None and (names or form != "table"):
                other = "-o name" if names else f"--format {form}"
                forbid_together("--columns", other, "only a table has columns")
            view = View(_chosen(columns, known), names is not None, headings)
            return command(*arguments, view=view, **options)

        return with_options(
            update_wrapper(with_view, command),
            click.option(
                "--columns",
                metavar="NAME,…",
                shell_complete=complete,
                help=f"Show these columns, in this order: {', '.join(headings)}.",
            ),
            click.option("-o", "names", type=click.Choice(["name"]), help="Print addresses only."),
            click.option(
                "--no-headers",
                "headings",
                is_flag=True,
                flag_value=False,
                default=True,
                help="Leave the headings of the table out.",
            ),
        )

    return decorate


def _typed(heading: str) -> str:
    """A heading as an option has it: `used-by`."""
    return heading.lower().replace(" ", "-")


def _chosen(text: str | None, known: Sequence[Column]) -> tuple[str, ...]:
    """The headings of `address,used-by`.

    Raises:
        UsageError: there is no such column.
    """
    if text is None:
        return ()
    by_name = {_typed(column.heading): column.heading for column in known}
    words = [word.strip().lower().replace("_", "-").replace(" ", "-") for word in text.split(",")]
    unknown = [word for word in words if word not in by_name]
    if unknown:
        message = f"no such column: {', '.join(map(repr, unknown))}"
        raise UsageError(message, f"choose from: {','.join(by_name)}")
    return tuple(by_name[word] for word in words)
