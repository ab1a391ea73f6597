"""`vfiomgr cdi …`."""

from __future__ import annotations

import click

from vfiomgr.cli.lazy import LazyGroup
from vfiomgr.cli.session import session_options

_COMMANDS = {
    "generate": ("vfiomgr.cli.cdi_generate", "generate"),
    "list": ("vfiomgr.cli.cdi_list", "list_devices"),
    "check": ("vfiomgr.cli.cdi_check", "check"),
    "remove": ("vfiomgr.cli.cdi_remove", "remove"),
}


@click.group("cdi", cls=LazyGroup, table=_COMMANDS)
@session_options()
def cdi() -> None:
    """Container Device Interface: specifications that name devices for container runtimes."""
