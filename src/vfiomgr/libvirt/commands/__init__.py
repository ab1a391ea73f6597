"""`vfiomgr libvirt …`."""

from __future__ import annotations

import click

from vfiomgr.cli.options import LazyGroup

_COMMANDS = {
    "hostdev": ("vfiomgr.libvirt.commands.hostdev", "hostdev"),
    "domain": ("vfiomgr.libvirt.commands.domain", "domain"),
    "edit": ("vfiomgr.libvirt.commands.edit", "edit"),
    "attach": ("vfiomgr.libvirt.commands.attach", "attach"),
    "detach": ("vfiomgr.libvirt.commands.attach", "detach"),
    "hook": ("vfiomgr.libvirt.commands.hook", "hook"),
    "list": ("vfiomgr.libvirt.commands.attach", "list_claims"),
}


@click.group("libvirt", cls=LazyGroup, table=_COMMANDS)
def libvirt() -> None:
    """Create and edit libvirt domains, and attach devices."""
