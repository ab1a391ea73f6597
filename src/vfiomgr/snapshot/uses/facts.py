"""Uses of PCI functions by the host: file systems, swap, volumes, the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.snapshot.uses.disks import read_claims, read_disk_uses
from vfiomgr.snapshot.uses.interfaces import read_network_uses
from vfiomgr.snapshot.uses.mounts import PROC

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot, HostUse


def read_host_uses(tree: HostTree) -> tuple[HostUse, ...] | None:
    """The uses shown by tables of the host; None without /proc."""
    if not tree.children(PROC):
        return None
    return (*read_disk_uses(tree, everywhere=False), *read_network_uses(tree))


def read_all_uses(
    tree: HostTree, devices: Iterable[PciDevice], *, with_claims: bool = True
) -> tuple[HostUse, ...] | None:
    """Like `read_host_uses`, for decisions.

    It includes the mounts of all namespaces, all active interfaces, and `with_claims` the kernel's
    claims on disks without known users.
    """
    if not tree.children(PROC):
        return None
    disks = read_disk_uses(tree, everywhere=True)
    known = frozenset(use.address for use in disks)
    claims = read_claims(tree, known) if with_claims else ()
    return (*disks, *claims, *read_network_uses(tree, devices))


def with_present_uses(host: HostSnapshot, tree: HostTree) -> HostSnapshot:
    """A scanned host with the present uses of its functions.

    Persistence mode, which requires a program, is kept as found before.
    """
    found = None if host.host_uses is None else read_all_uses(tree, host.devices)
    if found is None:
        return host
    kept = (use for use in host.host_uses or () if use.kind == "persistence-mode")
    return replace(host, host_uses=(*found, *kept))
