"""A device of the host as a domain of libvirt has it.

Lines are those of the text that a domain was read from, counted from 1.
"""

from __future__ import annotations

from typing import Literal

from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value

NO_ROM = "off"
"""As the path of an option ROM: the guest sees none."""


class GuestAddress(Value, order=True):
    """Where a function sits in the guest; `bus` is the index of a PCI controller."""

    bus: int
    slot: int
    function: int
    multifunction: bool = False
    domain: int = 0

    @property
    def device(self) -> tuple[int, int, int]:
        """Domain, bus and slot, which all functions of one device have in common."""
        return (self.domain, self.bus, self.slot)


class DomainHostdev(Value):
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


class QemuProperty(Value):
    """A property of QEMU's device that libvirt has no word for (`<qemu:override>`)."""

    name: str
    type: Literal["bool", "unsigned"]
    value: str


class GuestHostdev(Value):
    """A device of the host with its place in the guest; `title` is what pci.ids calls it."""

    device: DomainHostdev
    title: str
    properties: tuple[QemuProperty, ...] = ()
