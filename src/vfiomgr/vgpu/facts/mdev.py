"""Mediated devices (drivers/vfio/mdev/mdev_sysfs.c, Documentation/driver-api/vfio-mediated-device).

Parents are listed in /sys/class/mdev_bus; a recorded host may lack that class, so the functions
with `mdev_supported_types` and the parents of active devices count too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr import paths
from vfiomgr.pci.iommu import group_number
from vfiomgr.vgpu.model import Vgpu, VgpuParent, VgpuType, describe_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vfiomgr.host.tree import HostTree
    from vfiomgr.paths import HostPath
    from vfiomgr.pci.model import PciDevice

TYPES = "mdev_supported_types"


def read_mdevs(
    tree: HostTree, devices: Iterable[PciDevice]
) -> tuple[tuple[VgpuParent, ...], tuple[Vgpu, ...]]:
    """Read all parents of mediated devices by name, and all active devices by UUID."""
    active = {
        uuid: directory
        for uuid in tree.children(paths.MDEV_DEVICES)
        if (directory := tree.resolve(paths.MDEV_DEVICES / uuid))
    }
    parents = _read_parents(tree, devices, {mdev.parent for mdev in active.values()})
    names = {(p.path, kind.id): kind.name for p in parents for kind in p.types}
    found = (_read_mdev(tree, uuid, place, names) for uuid, place in active.items())
    return parents, tuple(found)


def _read_parents(
    tree: HostTree, devices: Iterable[PciDevice], active: Iterable[HostPath]
) -> tuple[VgpuParent, ...]:
    """All parents of mediated devices, sorted by name; any function may be one.

    Type names are read once for all virtual functions of a GPU, as one driver serves them.
    """
    functions = {str(device.address): device for device in devices}
    directories = {name: paths.MDEV_PARENTS / name for name in tree.children(paths.MDEV_PARENTS)}
    for name in functions:  # the same by name, where it is listed as a parent too
        directory = paths.PCI_DEVICES / name
        if name not in directories and tree.exists(directory / TYPES):
            directories[name] = directory
    resolved = {real for directory in directories.values() if (real := tree.resolve(directory))}
    known: dict[tuple[str, str], VgpuType] = {}
    found = [
        _read_parent(tree, real, functions.get(real.name), known)
        for real in sorted({*resolved, *active}, key=lambda p: p.name)
    ]
    return tuple(sorted((*found, *_silent(tree, found, functions)), key=lambda p: p.name))


def _silent(
    tree: HostTree, parents: Iterable[VgpuParent], functions: dict[str, PciDevice]
) -> Iterable[VgpuParent]:
    """Virtual functions of the same GPU and driver whose types are unknown."""
    siblings = {(p.gpu, p.driver) for p in parents if p.is_virtual_function}
    named = {parent.name for parent in parents}
    for name, device in functions.items():
        gpu = str(device.physical_function)
        if name not in named and (gpu, device.driver) in siblings:
            place = tree.resolve(paths.PCI_DEVICES / name) or paths.PCI_DEVICES / name
            yield VgpuParent(name, place, "mdev", device.driver, gpu, (), ())


def _read_parent(
    tree: HostTree,
    directory: HostPath,
    function: PciDevice | None,
    known: dict[tuple[str, str], VgpuType],
) -> VgpuParent:
    physical = function.physical_function if function else None
    gpu = str(physical or directory.name)
    types = directory / TYPES
    ids = tree.children(types)
    for type_id in ids:
        if (gpu, type_id) not in known:
            known[gpu, type_id] = _read_type(tree, types / type_id)
    return VgpuParent(
        name=directory.name,
        path=directory,
        family="mdev",
        driver=function.driver if function else tree.link_name(directory / "driver"),
        gpu=gpu,
        types=tuple(known[gpu, type_id] for type_id in ids),
        available=tuple(_available(tree, types, type_id) for type_id in ids),
    )


def _read_type(tree: HostTree, directory: HostPath) -> VgpuType:
    return describe_type(
        directory.name,
        tree.read(directory / "name") or None,
        tree.read(directory / "description") or None,
        tree.read(directory / "device_api") or None,
    )


def _available(tree: HostTree, types: HostPath, type_id: str) -> int | None:
    text = tree.read(types / f"{type_id}/available_instances")
    return int(text) if text and text.isdecimal() else None


def read_mdev(tree: HostTree, uuid: str) -> Vgpu | None:
    """Read an active mediated device; None if there is none with this UUID."""
    directory = tree.resolve(paths.MDEV_DEVICES / uuid)
    return None if directory is None else _read_mdev(tree, uuid, directory, {})


def _read_mdev(
    tree: HostTree,
    uuid: str,
    directory: HostPath,
    names: Mapping[tuple[str, str], str | None],
) -> Vgpu:
    """Read a parent; `names` are the type names read so far, by parent path."""
    parent = directory.parent
    type_id = tree.link_name(directory / "mdev_type") or ""
    name = names.get((parent, type_id))
    if name is None and type_id and (parent, type_id) not in names:
        name = tree.read(parent / TYPES / type_id / "name") or None
    node = tree.read(parent / "numa_node")
    return Vgpu(
        uuid=uuid,
        family="mdev",
        parent=parent.name,
        type=type_id,
        type_name=name,
        driver=tree.link_name(directory / "driver"),
        iommu_group=group_number(tree, directory),
        vfio_device=next(iter(tree.children(directory / "vfio-dev")), None),
        numa_node=int(node) if node and node.isdecimal() else None,
    )
