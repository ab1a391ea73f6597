"""IOMMU groups, and what keeps a guest from owning one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vfiomgr.model.path import vfio_group_node
from vfiomgr.model.pci import is_address

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.model.path import HostPath
    from vfiomgr.model.pci import PciDevice

HARMLESS_DRIVERS = frozenset({"pcieport", "pci-stub"})
"""Drivers that do no DMA of their own (`driver_managed_dma`), and so never spoil a group."""


@dataclass(frozen=True, slots=True)
class IommuGroup:
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


@dataclass(frozen=True, slots=True)
class IommuState:
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


@dataclass(frozen=True, slots=True)
class VfioState:
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
