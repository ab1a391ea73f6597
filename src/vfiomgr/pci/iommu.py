"""IOMMU groups, and what keeps a guest from owning one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr import paths
from vfiomgr.paths import vfio_group_node
from vfiomgr.pci.model import is_address
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.host.tree import HostTree
    from vfiomgr.paths import HostPath
    from vfiomgr.pci.model import PciDevice


HARMLESS_DRIVERS = frozenset({"pcieport", "pci-stub"})
"""Drivers that do no DMA of their own (`driver_managed_dma`), and so never spoil a group."""


class IommuGroup(Value):
    """`/sys/kernel/iommu_groups/<number>`; `members` are PCI addresses and other device names."""

    number: int
    members: tuple[str, ...]
    name: str | None
    type: str | None
    has_node: bool
    """Whether `/dev/vfio/<number>` exists."""

    @property
    def has_pci_members(self) -> bool:
        """Whether PCI functions are in it; a mediated device has a group of its own."""
        return any(is_address(member) for member in self.members)

    @property
    def node(self) -> HostPath:
        """What a guest opens to own the group."""
        return vfio_group_node(self.number, noiommu=self.is_noiommu)

    @property
    def is_noiommu(self) -> bool:
        """A group of the unsafe no-IOMMU mode.

        Groups of emulated devices have the same name (vfio_noiommu_group_alloc in
        drivers/vfio/group.c), but no PCI function in them.
        """
        return self.name == "vfio-noiommu" and self.has_pci_members


class IommuState(Value):
    """Whether devices are isolated on this host, and the evidence."""

    units: tuple[str, ...]
    """IOMMUs that the kernel drives: the entries of /sys/class/iommu."""
    firmware_tables: tuple[str, ...]
    """ACPI tables that describe an IOMMU: DMAR (Intel), IVRS (AMD), IORT (Arm)."""
    has_groups: bool
    is_known: bool = True
    """False of a recording that lacks what would show it: no groups is no fact then."""

    @property
    def is_on(self) -> bool:
        """Groups exist only where an IOMMU isolates."""
        return self.has_groups


class VfioState(Value):
    """Parameters of VFIO's modules that decide what may be bound."""

    is_noiommu_on: bool = False
    """enable_unsafe_noiommu_mode of vfio."""
    is_denylist_off: bool = False
    """disable_denylist of vfio-pci."""


def is_blocking(device: PciDevice) -> bool:
    """Whether a member keeps its group from being viable (vfio_iommu_group_set_container)."""
    if device.driver is None or device.is_on_vfio or device.vfio_device is not None:
        return False
    return device.driver not in HARMLESS_DRIVERS


def blockers(devices: Iterable[PciDevice]) -> tuple[PciDevice, ...]:
    """The members that keep a group from being viable."""
    return tuple(device for device in devices if is_blocking(device))


def acs_override_words(command_line: str | None) -> tuple[str, ...]:
    """The words of a kernel command line with which a patched kernel pretends isolation."""
    words = (command_line or "").split()
    return tuple(word for word in words if word.startswith("pcie_acs_override="))


_ACPI_TABLES = paths.HostPath("/sys/firmware/acpi/tables")
_MODULES = paths.HostPath("/sys/module")
_IOMMU_TABLES = ("DMAR", "IVRS", "IORT")


def read_groups(tree: HostTree) -> tuple[IommuGroup, ...]:
    """All groups, sorted by number; numbers have gaps."""
    numbers = sorted(int(name) for name in tree.children(paths.IOMMU_GROUPS) if name.isdecimal())
    return tuple(_read_group(tree, number) for number in numbers)


def _read_group(tree: HostTree, number: int) -> IommuGroup:
    directory = paths.IOMMU_GROUPS / str(number)
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
    places = (paths.IOMMU_GROUPS, paths.IOMMU_UNITS)
    return IommuState(
        is_known=bool(groups) or tree.is_live or any(map(tree.exists, places)),
        units=tuple(tree.children(paths.IOMMU_UNITS)),
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
