"""Groups of commands whose modules are imported when a command is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping


class LazyGroup(click.Group):
    """Finds its commands in a table: of each name the module, and what it is called there."""

    def __init__(
        self,
        *arguments: Any,  # noqa: ANN401 - click's own
        table: Mapping[str, tuple[str, str]],
        **settings: Any,  # noqa: ANN401
    ) -> None:
        super().__init__(*arguments, **settings)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table, which is that in which a newcomer meets them."""
        return [*self._table, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name."""
        if cmd_name not in self._table:
            return super().get_command(ctx, cmd_name)
        module, attribute = self._table[cmd_name]
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)  # noqa: S101 - the tables are ours
        return command
