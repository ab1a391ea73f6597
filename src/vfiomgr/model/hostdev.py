"""Devices of the host in a guest: as a domain has them, and as they are to be handed over.

Lines are those of the text that a domain was read from, counted from 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vfiomgr.model.pci import PciAddress

NO_ROM = "off"
"""As the path of an option ROM: the guest sees none."""


@dataclass(frozen=True, order=True, slots=True)
class GuestAddress:
    """Where a function sits in the guest; `bus` is the index of a PCI controller."""

    bus: int
    slot: int
    function: int
    multifunction: bool = False
    domain: int = 0


@dataclass(frozen=True, slots=True)
class DomainHostdev:
    """A device of the host in a domain: `<hostdev>`, hostdev `<interface>` or NVMe `<disk>`."""

    line: int
    kind: Literal["pci", "mdev", "other"]
    element: Literal["hostdev", "interface", "disk"] = "hostdev"
    address: PciAddress | None = None
    """Of a PCI function."""
    uuid: str | None = None
    """Of a mediated device, in lower case."""
    managed: bool = False
    guest: GuestAddress | None = None
    alias: str | None = None
    model: str | None = None
    """`vfio-pci` and others, of a mediated device."""
    driver: str | None = None
    """`<driver name>`: `vfio`, or what older releases knew."""
    driver_model: str | None = None
    iommufd: bool | None = None
    display: bool = False
    ramfb: bool = False
    boot_order: int | None = None
    rom_file: str | None = None
    acpi_nodes: str | None = None
    """`<acpi nodeset>`: cells of the guest that are its own."""
    is_unassigned: bool = False
    """Whether the domain keeps it from others, and the guest does not have it."""
    disk_target: str | None = None
    """`vda`: the disk of the guest that an NVMe controller of the host is behind."""
    has_rom: bool = True
    """Whether the guest sees its option ROM; not with `<rom bar='off'>` or `enabled='no'`."""

    @property
    def name(self) -> str:
        """The address or the UUID; empty for what is neither."""
        return str(self.address) if self.address is not None else self.uuid or ""

    @property
    def is_seen(self) -> bool:
        """Whether the guest sees the device itself: not as an NVMe disk, and not unassigned."""
        return not self.is_unassigned and self.element != "disk"


@dataclass(frozen=True, slots=True)
class HandOver:
    """How a device is given to a guest."""

    is_managed: bool = False
    """Whether libvirt binds and unbinds it."""
    display: bool = False
    """Whether QEMU shows the vGPU's own display."""
    ramfb: bool = False
    """Whether it shows a framebuffer until the guest's driver has the vGPU."""
    rom: str | None = None
    """An absolute path, or NO_ROM."""
    boot_order: int | None = None
    driver_model: str | None = None
    """The VFIO driver that libvirt binds it to."""
    has_iommufd: bool = False
    """Whether QEMU opens it through /dev/iommu."""
    is_unassigned: bool = False
    """Whether libvirt takes it from the host, and the guest does not get it."""
    acpi_nodes: str | None = None
    """Cells of the guest that are the device's own memory: `1-8`."""
    has_vga: bool = False
    """Whether it answers to the legacy addresses of VGA, for SeaBIOS."""
    subsystem: str | None = None
    """What the guest sees as its subsystem, `17aa:3aff`, where a driver asks for it."""


@dataclass(frozen=True, slots=True)
class DeviceWish:
    """A device of the host, by its address or UUID, as a user names it."""

    name: str
    hand_over: HandOver = HandOver()
    is_alone: bool = False
    """Whether the other functions of its slot stay out."""


@dataclass(frozen=True, slots=True)
class QemuProperty:
    """A property of QEMU's device that libvirt has no word for (`<qemu:override>`)."""

    name: str
    type: Literal["bool", "unsigned"]
    value: str


@dataclass(frozen=True, slots=True)
class GuestHostdev:
    """A device of the host with its place in the guest; `title` is what pci.ids calls it."""

    device: DomainHostdev
    title: str
    properties: tuple[QemuProperty, ...] = ()
