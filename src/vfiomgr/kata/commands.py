"""`vfiomgr kata …`."""

from __future__ import annotations

import click

from vfiomgr.cli.main import LazyGroup
from vfiomgr.cli.session import session_options

_COMMANDS = {
    "config": ("vfiomgr.kata.config.commands.config", "config"),
    "install": ("vfiomgr.kata.install.commands", "install"),
    "uninstall": ("vfiomgr.kata.install.commands", "uninstall"),
    "runtimeclass": ("vfiomgr.kata.manifests.commands", "runtimeclass"),
    "pod": ("vfiomgr.kata.manifests.commands", "pod"),
    "explain": ("vfiomgr.kata.explain.commands.explain", "explain"),
    "run-command": ("vfiomgr.kata.run.commands", "command"),
    "check-image": ("vfiomgr.kata.explain.commands.check_image", "check_image"),
}


@click.group("kata", cls=LazyGroup, table=_COMMANDS)
@session_options()
def kata() -> None:
    """Kata Containers: what hands a device to a secure container."""
