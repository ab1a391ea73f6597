"""A host device in a libvirt domain.

Line numbers are those of the text that the domain was read from, counted from 1.
"""

from __future__ import annotations

from typing import Literal

from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value

NO_ROM = "off"
"""As the path of an option ROM: the guest sees no ROM."""


class GuestAddress(Value, order=True):
    """Where a function sits in the guest; `bus` is the index of a PCI controller."""

    bus: int
    slot: int
    function: int
    multifunction: bool = False
    domain: int = 0

    @property
    def device(self) -> tuple[int, int, int]:
        """Domain, bus and slot, which all functions of one device share."""
        return (self.domain, self.bus, self.slot)


class DomainHostdev(Value):
    """A host device in a domain: `<hostdev>`, hostdev `<interface>` or NVMe `<disk>`."""

    line: int
    kind: Literal["pci", "mdev", "other"]
    element: Literal["hostdev", "interface", "disk"] = "hostdev"
    address: PciAddress | None = None
    """The address of a PCI function."""
    uuid: str | None = None
    """The UUID of a mediated device, in lower case."""
    managed: bool = False
    guest: GuestAddress | None = None
    alias: str | None = None
    model: str | None = None
    """The model of a mediated device, e.g. `vfio-pci`."""
    driver: str | None = None
    """`<driver name>`: `vfio`, or a value of older releases."""
    driver_model: str | None = None
    iommufd: bool | None = None
    display: bool = False
    ramfb: bool = False
    boot_order: int | None = None
    rom_file: str | None = None
    acpi_nodes: str | None = None
    """`<acpi nodeset>`: guest cells for the device only."""
    is_unassigned: bool = False
    """Whether the domain reserves it, but the guest does not get it."""
    disk_target: str | None = None
    """`vda`: the guest disk that uses an NVMe controller of the host."""
    has_rom: bool = True
    """Whether the guest sees its option ROM; false with `<rom bar='off'>` or `enabled='no'`."""

    @property
    def name(self) -> str:
        """The address or the UUID; empty for other kinds."""
        return str(self.address) if self.address is not None else self.uuid or ""

    @property
    def is_seen(self) -> bool:
        """Whether the guest sees the device itself: not an NVMe disk, and not unassigned."""
        return not self.is_unassigned and self.element != "disk"


class QemuProperty(Value):
    """A property of QEMU's device for which libvirt has no element (`<qemu:override>`)."""

    name: str
    type: Literal["bool", "unsigned"]
    value: str


class GuestHostdev(Value):
    """A host device with its place in the guest; `title` is its name in pci.ids."""

    device: DomainHostdev
    title: str
    properties: tuple[QemuProperty, ...] = ()
