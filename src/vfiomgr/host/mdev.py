"""Mediated devices (drivers/vfio/mdev/mdev_sysfs.c, Documentation/driver-api/vfio-mediated-device).

Parents are listed in /sys/class/mdev_bus; a recorded host may lack that class, so the functions
that hold `mdev_supported_types` and the parents of active devices count too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.host.iommu import group_number
from vfiomgr.model import path
from vfiomgr.model.vgpu import Vgpu, VgpuParent, VgpuType

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.path import HostPath
    from vfiomgr.model.pci import PciAddress

TYPES = "mdev_supported_types"


def read_parents(tree: HostTree, functions: Iterable[PciAddress]) -> tuple[VgpuParent, ...]:
    """All devices that make mediated devices, sorted by name; any of the functions may."""
    directories = [path.MDEV_PARENTS / name for name in tree.children(path.MDEV_PARENTS)]
    directories += [
        directory
        for address in functions
        if tree.exists((directory := path.pci_device(address)) / TYPES)
    ]
    directories += [
        device.parent
        for uuid in tree.children(path.MDEV_DEVICES)
        if (device := tree.resolve(path.MDEV_DEVICES / uuid))
    ]
    resolved = {real for directory in directories if (real := tree.resolve(directory))}
    return tuple(_read_parent(tree, real) for real in sorted(resolved, key=lambda p: p.name))


def _read_parent(tree: HostTree, directory: HostPath) -> VgpuParent:
    return VgpuParent(
        name=directory.name,
        path=directory,
        family="mdev",
        driver=tree.link_name(directory / "driver"),
        types=tuple(
            _read_type(tree, directory, type_id) for type_id in tree.children(directory / TYPES)
        ),
    )


def _read_type(tree: HostTree, parent: HostPath, type_id: str) -> VgpuType:
    directory = parent / TYPES / type_id
    description = tree.read(directory / "description")
    available = tree.read(directory / "available_instances")
    return VgpuType(
        parent=parent.name,
        id=type_id,
        name=tree.read(directory / "name"),
        description=", ".join(description.splitlines()) if description else None,
        device_api=tree.read(directory / "device_api"),
        available_instances=int(available) if available and available.isdecimal() else None,
    )


def read_mdevs(tree: HostTree) -> tuple[Vgpu, ...]:
    """All active mediated devices, sorted by UUID."""
    found = (read_mdev(tree, uuid) for uuid in tree.children(path.MDEV_DEVICES))
    return tuple(vgpu for vgpu in found if vgpu is not None)


def read_mdev(tree: HostTree, uuid: str) -> Vgpu | None:
    """One active mediated device; None where there is none of this UUID."""
    directory = tree.resolve(path.MDEV_DEVICES / uuid)
    if directory is None:
        return None
    type_id = tree.link_name(directory / "mdev_type") or ""
    node = tree.read(directory.parent / "numa_node")
    return Vgpu(
        uuid=uuid,
        family="mdev",
        parent=directory.parent.name,
        type=type_id,
        type_name=tree.read(directory.parent / TYPES / type_id / "name") if type_id else None,
        driver=tree.link_name(directory / "driver"),
        iommu_group=group_number(tree, directory),
        vfio_device=next(iter(tree.children(directory / "vfio-dev")), None),
        numa_node=int(node) if node and node.isdecimal() else None,
    )
