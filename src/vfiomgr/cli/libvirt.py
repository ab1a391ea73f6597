"""`vfiomgr libvirt …`."""

from __future__ import annotations

import click

from vfiomgr.cli.lazy import LazyGroup
from vfiomgr.cli.session import session_options

_COMMANDS = {
    "hostdev": ("vfiomgr.cli.libvirt_hostdev", "hostdev"),
    "domain": ("vfiomgr.cli.libvirt_domain", "domain"),
    "edit": ("vfiomgr.cli.libvirt_edit", "edit"),
    "preflight": ("vfiomgr.cli.libvirt_preflight", "preflight"),
    "define": ("vfiomgr.cli.libvirt_define", "define"),
    "attach": ("vfiomgr.cli.libvirt_attach", "attach"),
    "detach": ("vfiomgr.cli.libvirt_attach", "detach"),
    "hook": ("vfiomgr.cli.libvirt_hook", "hook"),
    "nodedev": ("vfiomgr.cli.libvirt_nodedev", "nodedev"),
    "list": ("vfiomgr.cli.libvirt_list", "list_claims"),
}


@click.group("libvirt", cls=LazyGroup, table=_COMMANDS)
@session_options()
def libvirt() -> None:
    """Libvirt domains: the XML that hands a device to a guest."""
