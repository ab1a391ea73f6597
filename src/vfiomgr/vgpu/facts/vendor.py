"""vGPUs that NVIDIA's driver exposes through VFIO itself: `nvidia/` below each virtual function.

The virtual function stays on the driver `nvidia`; a type's number in `current_vgpu_type` makes it a
vGPU (NVIDIA's vgpu-vfio host driver, Linux 6.8 and later; one file of it is public).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr import paths
from vfiomgr.paths import PCI_DEVICES, RUNTIME
from vfiomgr.vgpu.model import Vgpu, VgpuParent, VgpuType, WedgedFunction, describe_type

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.host.tree import HostTree
    from vfiomgr.paths import HostPath
    from vfiomgr.pci.model import PciAddress, PciDevice


DIRECTORY = "nvidia"
CURRENT = "current_vgpu_type"
CREATABLE = "creatable_vgpu_types"
_LINE = re.compile(r"^\s*([0-9]+)\s*:\s*(\S.*?)\s*$", re.MULTILINE)
"""`1148  : NVIDIA L40S-2Q`; a header has no number."""
_LIMIT = 1 << 16
EMPTY = "0"
_DEVICE_API = "vfio-pci"


def read_vendor_vgpus(
    tree: HostTree, devices: Iterable[PciDevice]
) -> tuple[tuple[VgpuParent, ...], tuple[Vgpu, ...]]:
    """Read the virtual functions that can be vGPUs, and the active vGPUs."""
    devices = tuple(devices)
    parents: list[VgpuParent] = []
    vgpus: list[Vgpu] = []
    for device in devices:
        if device.physical_function is None or device.driver is None or device.stuck is not None:
            continue
        current = read_current(tree, paths.pci_device(device.address))
        if current is None:
            continue
        parents.append(_parent(tree, device))
        if current != EMPTY:
            vgpus.append(_vgpu(device, current))
    parents += _lost(tree, devices, parents)
    return tuple(parents), tuple(_named(vgpus, parents))


def _lost(
    tree: HostTree, devices: Iterable[PciDevice], parents: Iterable[VgpuParent]
) -> Iterator[VgpuParent]:
    """Virtual functions of the same GPUs that the driver does not serve now."""
    gpus = {parent.gpu for parent in parents}
    named = {parent.name for parent in parents}
    for device in devices:
        gpu, name = str(device.physical_function), str(device.address)
        if gpu in gpus and name not in named:
            place = tree.resolve(paths.PCI_DEVICES / name) or paths.PCI_DEVICES / name
            yield VgpuParent(name, place, "vendor-vfio", device.driver, gpu, (), ())


def creatable_types(tree: HostTree, directory: HostPath) -> tuple[VgpuType, ...]:
    """The types that the driver offers for a virtual function now."""
    return tuple(_creatable(tree, directory))


def read_current(tree: HostTree, directory: HostPath) -> str | None:
    """The number of the current type of a virtual function, `0` for none; None without the file."""
    text = tree.read(directory / DIRECTORY / CURRENT)
    return text.strip() if text and text.strip().isdecimal() else None


def _parent(tree: HostTree, device: PciDevice) -> VgpuParent:
    directory = paths.pci_device(device.address)
    types = tuple(_creatable(tree, directory))
    return VgpuParent(
        name=str(device.address),
        path=tree.resolve(directory) or directory,
        family="vendor-vfio",
        driver=device.driver,
        gpu=str(device.physical_function),
        types=types,
        available=(1,) * len(types),
    )


def _creatable(tree: HostTree, directory: HostPath) -> Iterator[VgpuType]:
    """The types that the driver offers for a virtual function; none if it already has a type."""
    text = tree.read_text(directory / DIRECTORY / CREATABLE, _LIMIT) or ""
    for number, name in _LINE.findall(text):
        yield describe_type(number, name, None, _DEVICE_API)


def _vgpu(device: PciDevice, type_id: str) -> Vgpu:
    return Vgpu(
        uuid=None,
        family="vendor-vfio",
        parent=str(device.address),
        type=type_id,
        type_name=None,
        driver=device.driver,
        iommu_group=device.iommu_group,
        vfio_device=device.vfio_device,
        numa_node=device.numa_node,
    )


def _named(vgpus: Iterable[Vgpu], parents: Iterable[VgpuParent]) -> Iterator[Vgpu]:
    """Add the names of types that other virtual functions still offer."""
    names = {known.id: known.name for parent in parents for known in parent.types}
    for vgpu in vgpus:
        yield replace(vgpu, type_name=names.get(vgpu.type))


_MARKS = RUNTIME / "wedged"


def read_wedged(tree: HostTree) -> tuple[WedgedFunction, ...]:
    """The marked functions that still exist unchanged."""
    found: list[WedgedFunction] = []
    for name in tree.children(_MARKS):
        inode, _, why = (tree.read(_MARKS / name) or "").partition(" ")
        if why and inode == _inode(tree, name):
            found.append(WedgedFunction(name, why))
    return tuple(found)


def mark(tree: HostTree, address: PciAddress, why: str) -> None:
    """Record that a function rejects a type which its driver offers."""
    tree.make_directory(_MARKS)
    text = f"{_inode(tree, str(address))} {why}\n"
    tree.replace(_MARKS / str(address), text.encode(), durable=False)


def unmark(tree: HostTree, address: PciAddress) -> None:
    """Delete the record: the function has accepted a type."""
    if tree.exists(_MARKS / str(address)):
        tree.remove(_MARKS / str(address))


def _inode(tree: HostTree, name: str) -> str:
    place = tree.resolve(PCI_DEVICES / name)
    status = None if place is None else tree.status(place)
    return "" if status is None else str(status.st_ino)
