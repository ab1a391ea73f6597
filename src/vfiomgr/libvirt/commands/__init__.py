"""`vfiomgr libvirt …`."""

from __future__ import annotations

import click

from vfiomgr.cli.options import FormerTable, LazyGroup

_COMMANDS = {
    "hostdev": ("vfiomgr.libvirt.commands.hostdev", "hostdev"),
    "domain": ("vfiomgr.libvirt.commands.domain", "domain"),
    "edit": ("vfiomgr.libvirt.commands.edit", "edit"),
    "attach": ("vfiomgr.libvirt.commands.attach", "attach"),
    "detach": ("vfiomgr.libvirt.commands.attach", "detach"),
    "hook": ("vfiomgr.libvirt.commands.hook", "hook"),
    "list": ("vfiomgr.libvirt.commands.attach", "list_claims"),
}
_FORMER: FormerTable = {
    "define": "libvirt edit --define",
    "preflight": ("vfiomgr.libvirt.commands.preflight", "preflight"),
    "nodedev": ("vfiomgr.libvirt.commands", "former_nodedev"),
}
_FORMER_NODEDEV = {
    verb: f"vgpu {verb} --libvirt" for verb in ("define", "list", "start", "stop", "undefine")
}


@click.group("libvirt", cls=LazyGroup, table=_COMMANDS, unlisted=_FORMER)
def libvirt() -> None:
    """Create and edit libvirt domains, and attach devices."""


@click.group("nodedev", cls=LazyGroup, table={}, unlisted=_FORMER_NODEDEV, hidden=True)
def former_nodedev() -> None:
    """Manage vGPUs (mediated devices) through libvirt: see `vfiomgr vgpu list --help`."""
