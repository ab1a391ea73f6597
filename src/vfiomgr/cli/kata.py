"""`vfiomgr kata …`."""

from __future__ import annotations

import click

from vfiomgr.cli.lazy import LazyGroup
from vfiomgr.cli.session import session_options

_COMMANDS = {
    "config": ("vfiomgr.cli.kata_config", "config"),
    "runtimeclass": ("vfiomgr.cli.kata_runtimeclass", "runtimeclass"),
    "pod": ("vfiomgr.cli.kata_pod", "pod"),
    "explain": ("vfiomgr.cli.kata_explain", "explain"),
}


@click.group("kata", cls=LazyGroup, table=_COMMANDS)
@session_options()
def kata() -> None:
    """Kata Containers: configuration that hands a device to a secure container."""
