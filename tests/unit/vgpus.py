"""GPUs that make vGPUs, as values: for tests that vary a field or two."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from tests.unit.devices import host_of, pci_device, with_facts
from vfiomgr.pci.model import PciAddress
from vfiomgr.vgpu.model import Vgpu, VgpuParent, VgpuType, describe_type

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot

MEMORY = 49152
"""MiB of an NVIDIA A40."""


def a40_type(size: int, series: str = "Q") -> VgpuType:
    """A type of an A40 of so many GiB, as its driver describes it."""
    most = min(32, MEMORY // 1024 // size)
    return describe_type(
        f"nvidia-{500 + size}{'ABCQ'.index(series)}",
        f"NVIDIA A40-{size}{series}",
        f"num_heads=4, frl_config=60, framebuffer={size * 1024}M, "
        f"max_resolution=7680x4320, max_instance={most}",
        "vfio-pci",
    )


A40_TYPES = tuple(a40_type(size) for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 48))


def instance(parent: str, kind: VgpuType, number: int) -> Vgpu:
    """A mediated device."""
    uuid = f"00000000-0000-4000-8000-{number:012d}"
    return Vgpu(uuid, "mdev", parent, kind.id, kind.name, "nvidia", 7, None, None)


def add_divided_gpu(  # noqa: PLR0913 - all but the host and the bus have defaults
    host: HostSnapshot,
    bus: int,
    made: tuple[VgpuType, ...] = (),
    *,
    types: tuple[VgpuType, ...] = A40_TYPES,
    functions: int = 32,
    numa_node: int = 0,
) -> HostSnapshot:
    """A host with one more GPU whose virtual functions make mediated devices.

    `made` are the types of its instances, on its first virtual functions. A free function offers
    each type of their size of which the maximum is not reached, as the driver does.
    """
    physical = PciAddress(0, bus, 0, 0)
    virtual = [PciAddress(0, bus, 1 + n // 8, n % 8) for n in range(functions)]
    gpu = replace(
        pci_device(str(physical)),
        virtual_functions=tuple(virtual),
        sriov_totalvfs=functions,
        sriov_numvfs=functions,
        iommu_group=bus * 100,
        numa_node=numa_node,
    )
    members = [
        replace(pci_device(str(a)), physical_function=physical, iommu_group=bus * 100 + 1 + n)
        for n, a in enumerate(virtual)
    ]
    lock = made[0].framebuffer if made else None
    parents = tuple(
        VgpuParent(
            str(address),
            f"/sys/devices/pci0000:00/{address}",
            "mdev",
            "nvidia",
            str(physical),
            types,
            tuple(
                int(
                    number >= len(made)
                    and kind.framebuffer == (lock or kind.framebuffer)
                    and len(made) < (kind.max_instances or 0)
                )
                for kind in types
            ),
        )
        for number, address in enumerate(virtual)
    )
    vgpus = tuple(
        instance(str(virtual[number]), kind, bus * 1000 + number)
        for number, kind in enumerate(made)
    )
    grown = host_of(*host.devices, gpu, *members)
    return with_facts(
        grown,
        vgpu_parents=(*host.vgpus.parents, *parents),
        vgpus=(*host.vgpus.active, *vgpus),
    )


def vgpu_host(*made: tuple[VgpuType, ...], functions: int = 32) -> HostSnapshot:
    """A host of GPUs at buses 1, 2, …, each with its instances."""
    host = host_of()
    for bus, types in enumerate(made, start=1):
        host = add_divided_gpu(host, bus, types, functions=functions)
    return host
