"""`vfiomgr layout`, and its shortcuts `plan` and `apply`."""

from __future__ import annotations

import click

from vfiomgr.cli.options import LazyGroup

_COMMANDS = {
    "plan": ("vfiomgr.layout.commands.changes", "plan"),
    "apply": ("vfiomgr.layout.commands.changes", "apply"),
    "assert": ("vfiomgr.layout.commands.changes", "assert_"),
    "export": ("vfiomgr.layout.commands.changes", "export"),
    "revert": ("vfiomgr.layout.commands.changes", "revert"),
    "watch": ("vfiomgr.layout.commands.watch", "watch"),
    "install": ("vfiomgr.layout.commands.files", "install"),
    "uninstall": ("vfiomgr.layout.commands.files", "uninstall"),
    "import": ("vfiomgr.layout.commands.files", "import_"),
}
_FORMER = {
    "validate": ("vfiomgr.layout.commands.files", "validate"),
    "schema": "check layout --schema",
}


@click.group("layout", cls=LazyGroup, table=_COMMANDS, unlisted=_FORMER)
def layout() -> None:
    """Plan, apply and revert layouts, files that describe a host."""
