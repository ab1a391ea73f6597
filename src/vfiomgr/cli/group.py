"""Groups of commands whose modules are imported when a command is used."""

from __future__ import annotations

import importlib
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

if TYPE_CHECKING:
    from collections.abc import Mapping

_WIDTH = 100
"""Characters of a short help: shells cut it at the end of the line."""
Table = dict[str, tuple[str, str]]
"""The module and the attribute of each command."""


class LazyGroup(click.Group):
    """Finds its commands in a table; those in `unlisted` work but are not shown.

    Unlisted commands are former names (before 1.0) and commands that only services and hooks run.
    """

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401 - click's own
        table: Mapping[str, tuple[str, str]],
        unlisted: Mapping[str, tuple[str, str]] | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(*arguments, **settings)
        self._table = dict(table)
        self._unlisted = dict(unlisted or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order of the table, the basic ones first."""
        return [*self._table, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command with this name."""
        place = self._table.get(cmd_name) or self._unlisted.get(cmd_name)
        if place is None:
            return super().get_command(ctx, cmd_name)
        module, attribute = place
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)  # noqa: S101 - the tables are ours
        _refer_to_top(command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Its commands by name, then its options.

        A module is imported for the help of a command, so only where a shell shows it.
        """
        names = (name for name in self.list_commands(ctx) if name.startswith(incomplete))
        commands = [
            CompletionItem(name, describe=partial(self._short_help, ctx, name)) for name in names
        ]
        return commands + click.Command.shell_complete(self, ctx, incomplete)

    def _short_help(self, ctx: click.Context, name: str) -> str:
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(_WIDTH)


_EPILOG = "Options of all commands (--root, --snapshot, -v, --debug): see vfiomgr --help"


def _refer_to_top(command: click.Command) -> None:
    """Refer to the top-level help for shared options, in the help of all commands below."""
    if not isinstance(command, click.Group):
        command.epilog = command.epilog or _EPILOG
        return
    for below in command.commands.values():
        _refer_to_top(below)
