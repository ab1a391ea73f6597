"""`vfiomgr kata …`."""

from __future__ import annotations

import click

from vfiomgr.cli.lazy import LazyGroup
from vfiomgr.cli.session import session_options

_COMMANDS = {
    "config": ("vfiomgr.cli.kata_config", "config"),
    "install": ("vfiomgr.cli.kata_install", "install"),
    "uninstall": ("vfiomgr.cli.kata_install", "uninstall"),
    "runtimeclass": ("vfiomgr.cli.kata_runtimeclass", "runtimeclass"),
    "pod": ("vfiomgr.cli.kata_pod", "pod"),
    "explain": ("vfiomgr.cli.kata_explain", "explain"),
    "run-command": ("vfiomgr.cli.kata_run_command", "command"),
    "check-image": ("vfiomgr.cli.kata_check_image", "check_image"),
}


@click.group("kata", cls=LazyGroup, table=_COMMANDS)
@session_options()
def kata() -> None:
    """Kata Containers: what hands a device to a secure container."""
