"""What a snapshot has of vGPUs and their GPUs, and vfiomgr's own records: the door for `snapshot`.

The records name the vGPUs that vfiomgr made, and functions that reject their types. The UUID of a
mediated device is unique, but an address is not: after the driver or the virtual functions were
reloaded, a vGPU of the same type there belongs to someone else. Therefore the mark identifies the
incarnation of the function: the boot, and the inodes of its directory and of the driver's
directory, which kernfs never reuses (fs/kernfs/dir.c, __kernfs_new_node).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.documents.text import TextFile
from vfiomgr.paths import BOOT_ID, PCI_DEVICES, RUNTIME, SRIOV_MANAGE, HostPath
from vfiomgr.vgpu.facts import DIRECTORY, TYPES, persistence_uses, read_mdevs, read_vendor_vgpus
from vfiomgr.vgpu.model import MARKS, Vgpu, VgpuFacts, WedgedFunction
from vfiomgr.vgpu.quota.facts import read_quotas

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.function import Functions
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


def with_records(tree: HostTree, vgpus: VgpuFacts) -> VgpuFacts:
    """Add the records to the facet."""
    return replace(
        vgpus,
        marks=_read_marks(tree),
        made_functions=_read_made(tree, vgpus.active),
        wedged=_read_wedged(tree),
    )


_WEDGED = RUNTIME / "wedged"


def _read_wedged(tree: HostTree) -> tuple[WedgedFunction, ...]:
    """The marked functions that still exist unchanged."""
    found: list[WedgedFunction] = []
    for name in tree.children(_WEDGED):
        inode, _, why = (tree.read(_WEDGED / name) or "").partition(" ")
        if why and inode == _inode(tree, name):
            found.append(WedgedFunction(name, why))
    return tuple(found)


def mark(tree: HostTree, address: PciAddress, why: str) -> None:
    """Record that a function rejects a type which its driver offers."""
    tree.make_directory(_WEDGED)
    text = f"{_inode(tree, str(address))} {why}\n"
    tree.replace(_WEDGED / str(address), text.encode(), durable=False)


def unmark(tree: HostTree, address: PciAddress) -> None:
    """Delete the record: the function has accepted a type."""
    if tree.exists(_WEDGED / str(address)):
        tree.remove(_WEDGED / str(address))


def _inode(tree: HostTree, name: str) -> str:
    place = tree.resolve(PCI_DEVICES / name)
    status = None if place is None else tree.status(place)
    return "" if status is None else str(status.st_ino)


_MADE = RUNTIME / "made"


def _read_marks(tree: HostTree) -> tuple[TextFile, ...]:
    """All marks, including those of removed vGPUs."""
    # The temporary file of a killed process begins with a dot.
    names = (name for name in tree.children(MARKS) if not name.startswith("."))
    texts = ((MARKS / name, tree.read_text(MARKS / name)) for name in names)
    return tuple(TextFile(file, text) for file, text in texts if text is not None)


def _read_made(tree: HostTree, vgpus: Iterable[Vgpu]) -> tuple[str, ...]:
    """The virtual functions that still have the type set by vfiomgr."""
    names = (v.name for v in vgpus if v.uuid is None and is_made(tree, v.name, v.type))
    return tuple(names)


def claim(tree: HostTree, address: PciAddress, type_id: int) -> None:
    """Record that vfiomgr is about to set the type of a function.

    If the record cannot be written, the vGPU only counts as created by someone else.
    """
    incarnation = _incarnation(tree, str(address), str(type_id))
    with suppress(OSError):
        tree.make_directory(_MADE)
        tree.replace(_MADE / str(address), (incarnation or "").encode(), durable=False)


def disclaim(tree: HostTree, address: PciAddress) -> None:
    """Delete the record: the function has no type, or rejected it."""
    with suppress(OSError):
        if tree.exists(_MADE / str(address)):
            tree.remove(_MADE / str(address))


def is_made(tree: HostTree, name: str, type_id: str) -> bool:
    """Whether the record of a function says that vfiomgr set or adopted its type."""
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


__all__ = [
    "NO_VGPUS",
    "VGPU_ENTRIES",
    "persistence_uses",
    "read_quotas",
    "read_vgpus",
    "with_gpu_modes",
    "with_records",
    "with_vgpu_records",
]

VGPU_ENTRIES = frozenset({TYPES, DIRECTORY})
"""Entries of functions that have to do with vGPUs."""
NO_VGPUS = VgpuFacts((), ())
"""The facet of a host whose devices are not read."""


def read_vgpus(
    tree: HostTree,
    functions: Functions,
    devices: tuple[PciDevice, ...],
    only_types: frozenset[str] | None = None,
) -> VgpuFacts:
    """Where vGPUs can be created, and the active ones."""
    mdev_parents, mdevs = read_mdevs(tree, functions, devices, only_types)
    parents, vgpus = read_vendor_vgpus(tree, functions, devices)
    return VgpuFacts((*mdev_parents, *parents), (*mdevs, *vgpus))


_MODULES = HostPath("/sys/module")
_I915_PARAMETERS = _MODULES / "i915/parameters"


def _if(tree: HostTree, known: HostPath, path: HostPath) -> bool | None:
    """Whether a path exists; None if a directory does not that each host has beside it."""
    return True if tree.exists(path) else False if tree.exists(known) else None


def with_vgpu_records(
    tree: HostTree, devices: tuple[PciDevice, ...], vgpus: VgpuFacts
) -> VgpuFacts:
    """Add what only changes need."""
    return replace(
        with_records(tree, vgpus),
        has_sriov_manage=tree.exists(SRIOV_MANAGE),
        has_nvidia_vgpu=_if(tree, _MODULES / "nvidia", _MODULES / "nvidia_vgpu_vfio"),
        i915_max_vfs=(tree.read(_I915_PARAMETERS / "max_vfs") or "")
        if tree.exists(_I915_PARAMETERS)
        else None,
        quotas=read_quotas(tree, devices),
    )


def with_gpu_modes(host: HostSnapshot, tree: HostTree) -> HostSnapshot:
    """Add what nvidia-smi says: GPU modes, GPU instances, and the types of GPUs in MIG mode."""
    from vfiomgr.vgpu import nvidia_smi  # noqa: PLC0415 - few commands ask nvidia-smi

    log = nvidia_smi.read_log(tree, host.devices)
    modes = nvidia_smi.parse_modes(log)
    divided = frozenset(mode.gpu for mode in modes if mode.mig)
    parents, active = nvidia_smi.with_known_types(
        tree, host.devices, host.vgpus.parents, host.vgpus.active, divided
    )
    vgpus = replace(
        host.vgpus,
        modes=nvidia_smi.with_memory(modes, parents),
        partitions=nvidia_smi.read_partitions(tree, host.devices, divided, log),
        parents=parents,
        active=nvidia_smi.with_places(tree, active, parents, divided),
    )
    return replace(host, vgpus=vgpus)
