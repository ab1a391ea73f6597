"""vGPUs: what a parent can make, and what it has made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["mdev"]
"""How the instances of a parent are made and handed over, probed from what is there."""


@dataclass(frozen=True, slots=True)
class VgpuType:
    """One entry of `<parent>/mdev_supported_types`; None where the kernel does not say."""

    parent: str
    id: str
    name: str | None
    description: str | None
    device_api: str | None
    available_instances: int | None


@dataclass(frozen=True, slots=True)
class VgpuParent:
    """A device that makes vGPUs: a PCI address or the name of a virtual device."""

    name: str
    path: str
    family: Family
    driver: str | None
    types: tuple[VgpuType, ...]


@dataclass(frozen=True, slots=True)
class Vgpu:
    """One active instance."""

    uuid: str
    family: Family
    parent: str
    type: str
    type_name: str | None
    driver: str | None
    iommu_group: int | None
    vfio_device: str | None
    numa_node: int | None

    def __str__(self) -> str:
        """`vGPU f715f63c-…`."""
        return f"vGPU {self.uuid}"
