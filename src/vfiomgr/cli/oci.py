"""`vfiomgr oci …`."""

from __future__ import annotations

import click

from vfiomgr.cli.lazy import LazyGroup
from vfiomgr.cli.session import session_options

_COMMANDS = {
    "inject": ("vfiomgr.cli.oci_inject", "inject"),
    "eject": ("vfiomgr.cli.oci_eject", "eject"),
}


@click.group("oci", cls=LazyGroup, table=_COMMANDS)
@session_options()
def oci() -> None:
    """OCI bundles: devices for a container that has not started yet."""
