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
    driver: str | None = None
    """None: the variant of VFIO that fits each function best."""
    only: bool = False
    """Leave the other functions of the slot where they are."""
    with_group: bool = False
    """Take the foreign members of the IOMMU groups too."""
    allow: frozenset[Allowance] = frozenset()
    kind: Literal["bind"] = "bind"


@dataclass(frozen=True, slots=True)
class Unbind:
    """Give functions back to the drivers that they had."""

    addresses: tuple[PciAddress, ...]
    only: bool = False
    with_group: bool = False
    allow: frozenset[Allowance] = frozenset()
    kind: Literal["unbind"] = "unbind"


@dataclass(frozen=True, slots=True)
class CreateVgpu:
    """Make a vGPU of a type on a parent."""

    parent: str
    type: str
    uuid: str
    kind: Literal["create-vgpu"] = "create-vgpu"


@dataclass(frozen=True, slots=True)
class RemoveVgpu:
    """Remove vGPUs."""

    uuids: tuple[str, ...]
    kind: Literal["remove-vgpu"] = "remove-vgpu"


def named_functions(intent: Intent) -> tuple[PciAddress, ...]:
    """The PCI functions that an intent names."""
    return intent.addresses if isinstance(intent, Bind | Unbind) else ()


Intent = Bind | Unbind | CreateVgpu | RemoveVgpu
