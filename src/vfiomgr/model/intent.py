"""What a user wants; the planner turns an intent into a plan or a refusal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from vfiomgr.model.pci import PciAddress

Allowance = Literal["boot-display", "in-use", "mounted-disk", "default-route"]
"""The guards that a user may override, by the value of `--allow`."""

ALLOWANCES: tuple[Allowance, ...] = get_args(Allowance)


@dataclass(frozen=True, slots=True)
class Bind:
    """Hand functions to guests: put them and their companions on a VFIO driver."""

    addresses: tuple[PciAddress, ...]
    driver: str = "vfio-pci"
    only: bool = False
    """Leave the other functions of the slot where they are."""
    with_group: bool = False
    """Take the foreign members of the IOMMU groups too."""
    allow: frozenset[Allowance] = frozenset()


@dataclass(frozen=True, slots=True)
class Unbind:
    """Give functions back to the drivers that they had."""

    addresses: tuple[PciAddress, ...]
    only: bool = False
    with_group: bool = False


@dataclass(frozen=True, slots=True)
class CreateVgpu:
    """Make a vGPU of a type on a parent."""

    parent: str
    type: str
    uuid: str


@dataclass(frozen=True, slots=True)
class RemoveVgpu:
    """Remove vGPUs."""

    uuids: tuple[str, ...]


Intent = Bind | Unbind | CreateVgpu | RemoveVgpu
