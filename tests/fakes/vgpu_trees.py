"""Large hosts with vGPUs as directories in which nothing reacts: to be read, and quick to make.

    make_vgpu_tree(root)                         # 8 GPUs, 32 virtual functions each, 20 types
    make_vgpu_tree(root, family="vendor")

Files of the same text have many names: whoever writes to one writes to all.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from tests.fakes.functions import Functions, Groups, PciFunction
from tests.fakes.machine import lay_out_machine
from tests.fakes.nvidia.cards import A40, L40S
from tests.fakes.nvidia.gpus import DRIVER
from tests.fakes.sysfs import Sysfs
from vfiomgr.paths import MDEV_PARENTS, PCI_DEVICES, PCI_DRIVERS, VFIO_CDEVS, VFIO_NODES, HostPath

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fakes.nvidia.cards import VgpuKind

_TYPES = "mdev_supported_types"


_PER_DOMAIN = 8
"""GPUs of a PCI domain, of as many as they take."""


def make_vgpu_tree(
    root: str | os.PathLike[str],
    *,
    gpus: int = 8,
    vfs: int = 32,
    types: int = 20,
    family: Literal["mdev-sriov", "vendor"] = "mdev-sriov",
) -> None:
    """Lay a host out; each GPU is on a bus of its own, and no vGPU is there yet."""
    os.makedirs(root, exist_ok=True)
    tree = _Tree(os.path.realpath(root), family)
    for index in range(gpus):
        bus = 0x11 + 0x10 * (index % _PER_DOMAIN)
        tree.add_gpu(f"{index // _PER_DOMAIN:04x}:{bus:02x}", index % 2, vfs)
    card = A40 if family == "mdev-sriov" else L40S
    tree.give_types(card.kinds[:types])


class _Tree:
    def __init__(self, root: str, family: str) -> None:
        self._family = family
        self._card = A40 if family == "mdev-sriov" else L40S
        self._sysfs = Sysfs(root)
        self._groups = Groups(self._sysfs)
        self._functions = Functions(self._sysfs, self._groups)
        self._virtual: list[HostPath] = []
        self._next_group = 0
        lay_out_machine(self._sysfs, boot=1, has_iommu=True)
        self._sysfs.make(PCI_DRIVERS / DRIVER)

    def add_gpu(self, bus: str, numa_node: int, vfs: int) -> None:
        """A GPU at `<bus>:00.0` and its virtual functions from `<bus>:00.4` on."""
        gpu = PciFunction(
            address=f"{bus}:00.0",
            vendor="10de",
            device=self._card.device,
            class_code="030200",
            group=self._group(),
            numa_node=numa_node,
            total_vfs=vfs,
            vf_device=self._card.device,
            vf_offset=4,
            vf_stride=1,
        )
        directory = self._add(gpu)
        self._sysfs.put(directory / "sriov_numvfs", str(vfs))
        for index in range(vfs):
            address = f"{bus}:{index + 4 >> 3:02x}.{index + 4 & 7}"
            place = self._add(gpu.virtual(address, self._group()))
            self._sysfs.link(place / "physfn", directory)
            self._sysfs.link(directory / f"virtfn{index}", place)
            self._virtual.append(place)

    def _group(self) -> int:
        self._next_group += 1
        return self._next_group

    def _add(self, function: PciFunction) -> HostPath:
        place = self._functions.add(function)
        self._sysfs.link(place / "driver", PCI_DRIVERS / DRIVER)
        self._sysfs.link(PCI_DRIVERS / DRIVER / function.address, place)
        self._functions.show_driver(function.address, DRIVER)
        return place

    def give_types(self, kinds: tuple[VgpuKind, ...]) -> None:
        """Let all virtual functions have the same files."""
        parts = dict(self._parts(kinds))
        for number, place in enumerate(self._virtual):
            if self._family == "mdev-sriov":
                self._sysfs.link(MDEV_PARENTS / place.name, place)
                for kind in kinds:
                    self._sysfs.make(place / _TYPES / f"nvidia-{kind.number}" / "devices")
            else:
                self._serve(place, number)
            self._fill(place, parts)

    def _parts(self, kinds: tuple[VgpuKind, ...]) -> Iterator[tuple[str, str]]:
        if self._family == "vendor":
            rows = [f"{kind.number:<5} : {kind.name}" for kind in kinds]
            yield "nvidia/creatable_vgpu_types", "\n".join(["ID    : vGPU Name", *rows])
            yield "nvidia/current_vgpu_type", "0"
            return
        for kind in kinds:
            start = f"{_TYPES}/nvidia-{kind.number}"
            yield f"{start}/name", kind.name
            yield f"{start}/description", kind.description
            yield f"{start}/device_api", "vfio-pci"
            yield f"{start}/available_instances", "1"
            yield f"{start}/create", ""

    def _fill(self, place: HostPath, parts: dict[str, str]) -> None:
        """The first virtual function gets files, the others names of them."""
        first = self._virtual[0]
        for path, text in parts.items():
            if place == first:
                self._sysfs.put(place / path, text)
            else:
                os.makedirs(os.path.dirname(self._sysfs.real(place / path)), exist_ok=True)
                os.link(self._sysfs.real(first / path), self._sysfs.real(place / path))

    def _serve(self, place: HostPath, number: int) -> None:
        """What VFIO shows of a function of the vendor's own."""
        name = f"vfio{number}"
        self._sysfs.put(place / "vfio-dev" / name / "dev", f"511:{number}")
        self._sysfs.link(f"/sys/class/vfio-dev/{name}", place / "vfio-dev" / name)
        self._sysfs.put_bytes(VFIO_CDEVS / name, b"", 0o600)
        group = self._groups.of(PCI_DEVICES / place.name)
        self._sysfs.put_bytes(VFIO_NODES / str(group), b"", 0o600)
