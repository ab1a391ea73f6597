"""Completion of arguments and options: what is common to the functions that click calls for it.

Each package has functions for what it knows in its module `completion`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import click
    from click.shell_completion import CompletionItem

    Items = list[CompletionItem[str]]
    Describe = Callable[[], str]
    Candidates = Iterable[tuple[str, Describe | None]]
    """Words, each with what says what it is."""


def continuing(
    context: click.Context, parameter: click.Parameter, incomplete: str, names: Candidates
) -> Items:
    """Those that continue what is typed, without those that an argument has already."""
    from click.shell_completion import CompletionItem  # noqa: PLC0415 - for shells alone

    typed = context.params.get(str(parameter.name)) or ()
    taken = frozenset(typed if isinstance(typed, tuple) else ())
    return [
        CompletionItem(name, describe=describe)
        for name, describe in dict(names).items()
        if name.startswith(incomplete) and name not in taken
    ]


def names_only(names: Iterable[str]) -> Iterator[tuple[str, None]]:
    """Candidates that say themselves what they are."""
    return ((name, None) for name in names)
