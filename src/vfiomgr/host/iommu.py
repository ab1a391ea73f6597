"""IOMMU groups: /sys/kernel/iommu_groups, and why there may be none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vfiomgr.model import path
from vfiomgr.model.iommu import IommuGroup, IommuState, VfioState

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.path import HostPath

_ACPI_TABLES = path.HostPath("/sys/firmware/acpi/tables")
_MODULES = path.HostPath("/sys/module")
_IOMMU_TABLES = ("DMAR", "IVRS", "IORT")


def read_groups(tree: HostTree) -> tuple[IommuGroup, ...]:
    """All groups, sorted by number; numbers have gaps."""
    numbers = sorted(int(name) for name in tree.children(path.IOMMU_GROUPS) if name.isdecimal())
    return tuple(_read_group(tree, number) for number in numbers)


def _read_group(tree: HostTree, number: int) -> IommuGroup:
    directory = path.IOMMU_GROUPS / str(number)
    group = IommuGroup(
        number=number,
        members=tuple(sorted(tree.children(directory / "devices"), key=_place)),
        name=tree.read(directory / "name") or None,
        type=tree.read(directory / "type") or None,
        has_node=False,
    )
    return replace(group, has_node=tree.exists(group.node))


def _place(member: str) -> tuple[int, str]:
    """Puts addresses in numeric order: only the domain, which comes first, varies in length."""
    return len(member), member


def read_state(tree: HostTree, groups: tuple[IommuGroup, ...]) -> IommuState:
    """What the kernel and the firmware say about IOMMUs; the command line is no evidence.

    A kernel that can drive an IOMMU has these directories also where it drives none
    (iommu_init in drivers/iommu/iommu.c); a recording without both was made without them.
    """
    places = (path.IOMMU_GROUPS, path.IOMMU_UNITS)
    return IommuState(
        is_known=bool(groups) or tree.is_live or any(map(tree.exists, places)),
        units=tuple(tree.children(path.IOMMU_UNITS)),
        firmware_tables=tuple(n for n in _IOMMU_TABLES if tree.exists(_ACPI_TABLES / n)),
        has_groups=any(group.has_pci_members and not group.is_noiommu for group in groups),
    )


def read_vfio_state(tree: HostTree) -> VfioState:
    """The parameters of VFIO's modules, where they are loaded."""
    return VfioState(
        is_noiommu_on=tree.read(_MODULES / "vfio/parameters/enable_unsafe_noiommu_mode") == "Y",
        is_denylist_off=tree.read(_MODULES / "vfio_pci/parameters/disable_denylist") == "Y",
    )


def group_number(tree: HostTree, device: HostPath) -> int | None:
    """The group of any device, by its `iommu_group` link."""
    name = tree.link_name(device / "iommu_group")
    return int(name) if name is not None and name.isdecimal() else None
