"""`vfiomgr help`."""

from __future__ import annotations

import click

from vfiomgr.cli.output import say_text


@click.command("help")
@click.argument("command", nargs=-1)
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
        below = group.get_command(found, name) if isinstance(group, click.Group) else None
        if below is None:
            message = f"No such command {name!r}."
            raise click.UsageError(message, ctx=found)
        found = click.Context(below, info_name=name, parent=found)
    say_text(found.get_help() + "\n")
