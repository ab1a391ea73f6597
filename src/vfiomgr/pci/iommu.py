"""IOMMU groups, what blocks their passthrough, and how to enable the IOMMU of a host."""

from __future__ import annotations

import re
import struct
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr import paths
from vfiomgr.expressions import expression
from vfiomgr.host.bounded import in_parts
from vfiomgr.host.kernel import parameters
from vfiomgr.host.text import text_of
from vfiomgr.paths import HostPath, vfio_group_node
from vfiomgr.pci.model import PciDevice, is_address
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


HARMLESS_DRIVERS = frozenset({"pcieport", "pci-stub"})
"""Drivers without DMA of their own (`driver_managed_dma`), which never block a group."""


class IommuGroup(Value):
    """`/sys/kernel/iommu_groups/<number>`; `members` are PCI addresses and other device names."""

    number: int
    members: tuple[str, ...]
    name: str | None
    type: str | None
    has_node: bool
    """Whether `/dev/vfio/<number>` exists."""
    direct_regions: tuple[str, ...] | None = None
    """Memory that the firmware wants mapped 1:1 for a member, as FIRST-LAST in hexadecimal.

    Regions of type `direct` in `reserved_regions` (iommu_group_show_resv_regions in
    drivers/iommu/iommu.c); None if unknown, as before Linux 4.11.
    """

    @property
    def has_pci_members(self) -> bool:
        """Whether it contains PCI functions; a mediated device has a group of its own."""
        return any(is_address(member) for member in self.members)

    @property
    def node(self) -> HostPath:
        """The device node of the group."""
        return vfio_group_node(self.number, noiommu=self.is_noiommu)

    @property
    def is_noiommu(self) -> bool:
        """Whether it is a group of the unsafe no-IOMMU mode.

        Groups of emulated devices have the same name (vfio_noiommu_group_alloc in
        drivers/vfio/group.c), but contain no PCI function.
        """
        return self.name == "vfio-noiommu" and self.has_pci_members


class IommuState(Value):
    """Whether devices are isolated on this host, with evidence."""

    units: tuple[str, ...]
    """IOMMUs in use by the kernel: the entries of /sys/class/iommu."""
    firmware_tables: tuple[str, ...]
    """ACPI tables that describe an IOMMU: DMAR (Intel), IVRS (AMD), IORT (Arm)."""
    has_groups: bool
    smmus: int | None = None
    """The SMMUs that the table IORT lists; None without IORT, or if it cannot be read."""
    has_tables: bool = True
    """Whether ACPI tables are visible: without them it is unknown what the firmware describes."""
    is_known: bool = True
    """False for a recording without the relevant files: the absence of groups proves nothing."""

    @property
    def is_on(self) -> bool:
        """True if there are groups, since only an IOMMU creates them."""
        return self.has_groups


class VfioState(Value):
    """Parameters of VFIO's modules that restrict what can be bound, and the nodes it creates."""

    is_noiommu_on: bool = False
    """enable_unsafe_noiommu_mode of vfio."""
    is_denylist_off: bool = False
    """disable_denylist of vfio-pci."""
    has_groups: bool | None = None
    """Whether VFIO creates a node for each IOMMU group (CONFIG_VFIO_GROUP); None until it loads."""
    has_cdevs: bool | None = None
    """Whether it creates one for each device (CONFIG_VFIO_DEVICE_CDEV); None if unknown."""


def is_blocking(device: PciDevice) -> bool:
    """Whether a member makes its group not viable (vfio_iommu_group_set_container)."""
    if device.driver is None or device.is_on_vfio or device.vfio_device is not None:
        return False
    return device.driver not in HARMLESS_DRIVERS


def blockers(devices: Iterable[PciDevice]) -> tuple[PciDevice, ...]:
    """The members that make a group not viable."""
    return tuple(device for device in devices if is_blocking(device))


def acs_override_words(command_line: str | None) -> tuple[str, ...]:
    """The words on a kernel command line that make a patched kernel report false isolation."""
    return tuple(one.word for one in parameters(command_line, "pcie_acs_override"))


_ACS_REDIRECT = ("disable_acs_redir=", "config_acs=")


def acs_redirect_words(command_line: str | None) -> tuple[str, ...]:
    """The words that change the ACS of ports (pci_setup in drivers/pci/pci.c; config_acs: 6.11)."""
    given = parameters(command_line, "pci")
    return tuple(p.word for p in given if any(name in p.value for name in _ACS_REDIRECT))


_MODULES = paths.HostPath("/sys/module")
_CLASSES = paths.HostPath("/sys/class")
_IOMMU_TABLES = ("DMAR", "IVRS", "IORT")
_DIRECT = expression(r"^0x([0-9a-f]{1,16}) 0x([0-9a-f]{1,16}) direct$", re.MULTILINE)


def read_groups(
    tree: HostTree, only: Container[int | None] | None = None
) -> tuple[IommuGroup, ...]:
    """All groups, or those of the numbers `only`, sorted by number; numbers may have gaps."""
    known = (int(name) for name in tree.children(paths.IOMMU_GROUPS) if name.isdecimal())
    numbers = sorted(number for number in known if only is None or number in only)

    def read(part: Iterable[int]) -> list[IommuGroup]:
        return [read_group(tree, number) for number in part]

    return tuple(in_parts(tree, read, numbers))


def read_group(tree: HostTree, number: int) -> IommuGroup:
    """One group; without members if it does not exist."""
    directory = paths.IOMMU_GROUPS / str(number)
    group = IommuGroup(
        number=number,
        members=tuple(sorted(tree.children(directory / "devices"), key=_place)),
        name=tree.read(directory / "name") or None,
        type=tree.read(directory / "type") or None,
        has_node=False,
        direct_regions=_direct_regions(tree.read(directory / "reserved_regions")),
    )
    return replace(group, has_node=True) if tree.exists(group.node) else group


def _direct_regions(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    found = (map(_hexadecimal, match.groups()) for match in _DIRECT.finditer(text))
    return tuple("-".join(ends) for ends in found)


def _hexadecimal(digits: str) -> str:
    return f"{int(digits, 16):x}"


def _place(member: str) -> tuple[int, str]:
    """The sort key for numeric order: only the domain, which is first, varies in length."""
    return len(member), member


def has_device_groups(groups: Iterable[IommuGroup]) -> bool:
    """Whether an IOMMU isolates functions."""
    return any(group.has_pci_members and not group.is_noiommu for group in groups)


def read_state(tree: HostTree, groups: tuple[IommuGroup, ...]) -> IommuState:
    """The state of IOMMUs according to kernel and firmware; the command line is no evidence.

    A kernel with IOMMU support has these directories even without an IOMMU (iommu_init in
    drivers/iommu/iommu.c); a recording without both was made without them.
    """
    places = (paths.IOMMU_GROUPS, paths.IOMMU_UNITS)
    return IommuState(
        is_known=bool(groups) or tree.is_live or any(map(tree.exists, places)),
        units=tuple(tree.children(paths.IOMMU_UNITS)),
        firmware_tables=tuple(n for n in _IOMMU_TABLES if tree.exists(paths.ACPI_TABLES / n)),
        has_groups=has_device_groups(groups),
        has_tables=tree.is_live or tree.exists(paths.ACPI_TABLES),
        smmus=_smmus_of(tree.read_bytes(paths.ACPI_TABLES / "IORT")),
    )


_IORT_NODES = struct.Struct("<36xII")
"""The header of the table, then the number of nodes and the offset of the first."""
_IORT_NODE = struct.Struct("<BH")
_SMMUS = frozenset({3, 4})
"""ACPI_IORT_NODE_SMMU and ACPI_IORT_NODE_SMMU_V3 in include/acpi/actbl2.h."""


def _smmus_of(table: bytes | None) -> int | None:
    """Count the SMMUs in an IORT, which also describes what else routes interrupts.

    See iort_scan_node in drivers/acpi/arm64/iort.c, and Arm DEN 0049. One read returns a page of a
    table at most: if it is longer and no SMMU was found until there, the number is unknown.
    """
    if table is None or len(table) < _IORT_NODES.size:
        return None
    count, offset = _IORT_NODES.unpack_from(table)
    found = 0
    for _ in range(count):
        if offset + _IORT_NODE.size > len(table):
            return found or None
        kind, length = _IORT_NODE.unpack_from(table, offset)
        found += kind in _SMMUS
        offset += max(length, _IORT_NODE.size)
    return found if count else None


def read_vfio_state(tree: HostTree) -> VfioState:
    """The parameters and nodes of VFIO's modules, if they are loaded.

    Its classes show the nodes of groups (class_create in drivers/vfio/group.c and vfio_main.c).
    """
    is_loaded = tree.exists(_CLASSES / "vfio-dev")
    return VfioState(
        is_noiommu_on=tree.read(_MODULES / "vfio/parameters/enable_unsafe_noiommu_mode") == "Y",
        is_denylist_off=tree.read(_MODULES / "vfio_pci/parameters/disable_denylist") == "Y",
        has_groups=True if tree.exists(_CLASSES / "vfio") else False if is_loaded else None,
        has_cdevs=_has_vfio_cdevs(tree) if is_loaded else None,
    )


def _has_vfio_cdevs(tree: HostTree) -> bool | None:
    """By the device numbers in /proc/devices (vfio_cdev_init in drivers/vfio/device_cdev.c)."""
    text = text_of(tree, "/proc/devices")
    return None if text is None else any(line.endswith(" vfio-dev") for line in text.splitlines())


def group_number(tree: HostTree, device: HostPath) -> int | None:
    """The group of any device, by its `iommu_group` link."""
    name = tree.link_name(device / "iommu_group")
    return int(name) if name is not None and name.isdecimal() else None
