"""`vfiomgr node …`."""

from __future__ import annotations

import click

from vfiomgr.cli.options import LazyGroup

_COMMANDS = {
    "run": ("vfiomgr.node.commands.run", "run"),
    "status": ("vfiomgr.node.commands.status", "status"),
    "release": ("vfiomgr.node.commands.status", "release"),
    "simulate": ("vfiomgr.node.commands.simulate", "simulate"),
    "manifests": ("vfiomgr.node.commands.manifests", "manifests"),
}
_OF_THE_AGENT = {
    "bind": ("vfiomgr.node.commands.run", "bind"),
    "create": ("vfiomgr.node.commands.run", "create"),
    "scan": ("vfiomgr.node.commands.run", "scan"),
}


@click.group("node", cls=LazyGroup, table=_COMMANDS, unlisted=_OF_THE_AGENT)
def node() -> None:
    """Offer the devices of this node to Kubernetes pods."""
