"""Virtual functions that take no type any more: marks in /run/vfiomgr/wedged.

Nothing in sysfs shows it. A mark counts for the very function that it was made of, told by the
inode of its directory: kernfs gives no number twice (fs/kernfs/dir.c, __kernfs_new_node).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.model.path import PCI_DEVICES, RUNTIME
from vfiomgr.model.vgpu import WedgedFunction

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.pci import PciAddress

_MARKS = RUNTIME / "wedged"


def read_wedged(tree: HostTree) -> tuple[WedgedFunction, ...]:
    """Those that are still the same functions."""
    found: list[WedgedFunction] = []
    for name in tree.children(_MARKS):
        inode, _, why = (tree.read(_MARKS / name) or "").partition(" ")
        if why and inode == _inode(tree, name):
            found.append(WedgedFunction(name, why))
    return tuple(found)


def mark(tree: HostTree, address: PciAddress, why: str) -> None:
    """Record that a function rejects what its driver offers."""
    tree.make_directory(_MARKS)
    text = f"{_inode(tree, str(address))} {why}\n"
    tree.replace(_MARKS / str(address), text.encode(), durable=False)


def unmark(tree: HostTree, address: PciAddress) -> None:
    """Record that it took a type after all."""
    if tree.exists(_MARKS / str(address)):
        tree.remove(_MARKS / str(address))


def _inode(tree: HostTree, name: str) -> str:
    place = tree.resolve(PCI_DEVICES / name)
    status = None if place is None else tree.status(place)
    return "" if status is None else str(status.st_ino)
