"""`vfiomgr layout …`, and `vfiomgr plan` and `apply`."""

from __future__ import annotations

import click

from vfiomgr.cli.options import LazyGroup

_COMMANDS = {
    "assert": ("vfiomgr.layout.commands.changes", "assert_"),
    "export": ("vfiomgr.layout.commands.changes", "export"),
    "revert": ("vfiomgr.layout.commands.changes", "revert"),
    "watch": ("vfiomgr.layout.commands.watch", "watch"),
    "install": ("vfiomgr.layout.commands.files", "install"),
    "uninstall": ("vfiomgr.layout.commands.files", "uninstall"),
    "import": ("vfiomgr.layout.commands.files", "import_"),
}


@click.group("layout", cls=LazyGroup, table=_COMMANDS)
def layout() -> None:
    """Install, export and revert layouts, files that describe a host."""
