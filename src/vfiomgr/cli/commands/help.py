"""`vfiomgr help`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from vfiomgr.cli.group import FormerGroup
from vfiomgr.cli.output import say_text

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def _complete(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """The commands below those that are typed."""
    found = context.find_root()
    for name in context.params.get("command") or ():
        group = found.command
        below = group.get_command(found, name) if isinstance(group, click.Group) else None
        if below is None:
            return []
        found = click.Context(below, info_name=name, parent=found)
    return found.command.shell_complete(found, incomplete) if incomplete[:1] != "-" else []


@click.command("help")
@click.argument("command", nargs=-1, shell_complete=_complete)
@click.pass_context
def help_(context: click.Context, command: tuple[str, ...]) -> None:
    """Show the help of a command.

    \b
    Examples:
      vfiomgr help
      vfiomgr help bind
      vfiomgr help libvirt domain
    """
    found = context.find_root()
    for name in command:
        group = found.command
        if isinstance(group, FormerGroup) and group.had(name):
            break
        below = group.get_command(found, name) if isinstance(group, click.Group) else None
        if below is None:
            message = f"No such command {name!r}."
            raise click.UsageError(message, ctx=found)
        found = click.Context(below, info_name=name, parent=found)
    say_text(found.get_help() + "\n")
