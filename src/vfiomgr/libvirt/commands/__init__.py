"""`vfiomgr libvirt …`."""

from __future__ import annotations

import click

from vfiomgr.cli.main import LazyGroup
from vfiomgr.cli.options import session_options

_COMMANDS = {
    "hostdev": ("vfiomgr.libvirt.commands.domain", "hostdev"),
    "domain": ("vfiomgr.libvirt.commands.domain", "domain"),
    "edit": ("vfiomgr.libvirt.commands.edit", "edit"),
    "preflight": ("vfiomgr.libvirt.commands.preflight", "preflight"),
    "define": ("vfiomgr.libvirt.commands.attach", "define"),
    "attach": ("vfiomgr.libvirt.commands.attach", "attach"),
    "detach": ("vfiomgr.libvirt.commands.attach", "detach"),
    "hook": ("vfiomgr.libvirt.commands.hook", "hook"),
    "nodedev": ("vfiomgr.libvirt.commands.nodedev", "nodedev"),
    "list": ("vfiomgr.libvirt.commands.attach", "list_claims"),
}


@click.group("libvirt", cls=LazyGroup, table=_COMMANDS)
@session_options()
def libvirt() -> None:
    """Libvirt domains: the XML that hands a device to a guest."""
