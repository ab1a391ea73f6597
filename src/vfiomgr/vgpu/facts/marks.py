"""The marks of vGPUs that vfiomgr made, and whether a virtual function is still what it made of it.

The UUID of a mediated device is its own. An address is not: after the driver was loaded anew, or
the virtual functions were made anew, a vGPU of the same type there is somebody else's. So whoever
sets a type notes which incarnation of the function has it: the boot, and the inodes of its
directory and of what the driver put there, of which kernfs gives none twice (fs/kernfs/dir.c,
__kernfs_new_node).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from vfiomgr.documents.text_file import TextFile
from vfiomgr.paths import BOOT_ID, PCI_DEVICES, RUNTIME
from vfiomgr.vgpu.facts.vendor import DIRECTORY
from vfiomgr.vgpu.model import MARKS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.model import PciAddress
    from vfiomgr.vgpu.model import Vgpu

_MADE = RUNTIME / "made"


def read_marks(tree: HostTree) -> tuple[TextFile, ...]:
    """All marks, also of vGPUs that are gone."""
    # A file that a killed process had not put in place yet begins with a dot.
    names = (name for name in tree.children(MARKS) if not name.startswith("."))
    texts = ((MARKS / name, tree.read_text(MARKS / name)) for name in names)
    return tuple(TextFile(file, text) for file, text in texts if text is not None)


def read_made(tree: HostTree, vgpus: Iterable[Vgpu]) -> tuple[str, ...]:
    """The virtual functions that have the type which vfiomgr gave to them."""
    names = (v.name for v in vgpus if v.uuid is None and _is_made(tree, v.name, v.type))
    return tuple(names)


def claim(tree: HostTree, address: PciAddress, type_id: int) -> None:
    """Note, before a function gets a type, that it is vfiomgr that gives it.

    A note that cannot be kept is of no harm: the vGPU counts as somebody else's.
    """
    incarnation = _incarnation(tree, str(address), str(type_id))
    with suppress(OSError):
        tree.make_directory(_MADE)
        tree.replace(_MADE / str(address), (incarnation or "").encode(), durable=False)


def disclaim(tree: HostTree, address: PciAddress) -> None:
    """Forget it: the function has no type, or did not take it."""
    with suppress(OSError):
        if tree.exists(_MADE / str(address)):
            tree.remove(_MADE / str(address))


def _is_made(tree: HostTree, name: str, type_id: str) -> bool:
    noted = tree.read_text(_MADE / name)
    return bool(noted) and noted == _incarnation(tree, name, type_id)


def _incarnation(tree: HostTree, name: str, type_id: str) -> str | None:
    place = tree.resolve(PCI_DEVICES / name)
    if place is None:
        return None
    inodes = [tree.status(directory) for directory in (place, place / DIRECTORY)]
    boot_id = tree.read(BOOT_ID)
    if boot_id is None or None in inodes:
        return None
    return " ".join([boot_id, *(str(found.st_ino) for found in inodes if found), type_id, "\n"])
