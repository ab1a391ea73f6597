"""Completion of what is typed, from what the host has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.cli.session import session_of
from vfiomgr.paths import PCI_DEVICES
from vfiomgr.pci.model import is_address

if TYPE_CHECKING:
    import click


def complete_address(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Addresses of the selected host that continue what is typed, with or without the domain."""
    session = session_of(context)
    if session.snapshot is not None:
        names = [str(device.address) for device in session.scan().devices]
    else:
        found = filter(is_address, session.tree.children(PCI_DEVICES))
        names = sorted(found, key=lambda name: (len(name), name))
    full = [name for name in names if name.startswith(incomplete)]
    return full or [name for name in names if name.partition(":")[2].startswith(incomplete)]
