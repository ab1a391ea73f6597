"""Domains of libvirt, as far as devices are concerned, and what its releases can read.

Lines are those of the text that the domain was read from, counted from 1 (formatdomain.html). The
releases of features are those of https://libvirt.org/news.html.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import blocker, refusal
from vfiomgr.libvirt.hostdev import DomainHostdev, GuestAddress
from vfiomgr.value import Value
from vfiomgr.version import Version

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT_PORT = "pcie-root-port"
EXPANDER = "pcie-expander-bus"
_X86 = (None, "x86_64", "i686")
TO_PCI = "pcie-to-pci-bridge"
"""What conventional PCI is behind on a machine of PCI Express."""

NAMESPACE = "urn:vfiomgr:libvirt:v1"
"""Of the element in a domain's metadata that has the hook act for it."""


class PciController(Value):
    """`<controller type='pci'>`: a bus of the guest with its index."""

    line: int
    index: int
    model: str
    guest: GuestAddress | None = None
    """Where it sits itself."""
    bus_nr: int | None = None
    """`<target busNr>` of an expander."""
    numa_node: int | None = None
    has_hotplug: bool = True
    hole64_kib: int | None = None


class NumaCell(Value):
    """A NUMA node of the guest."""

    number: int
    memory_bytes: int
    cpus: frozenset[int] = frozenset()


class DomainMemory(Value):
    """How much memory, and how much of it QEMU may lock."""

    total_bytes: int
    hard_limit_bytes: int | None = None
    is_locked: bool = False
    has_hugepages: bool = False
    hugepage_bytes: tuple[int, ...] = ()
    """Their sizes, where they are written."""
    host_nodes: frozenset[int] = frozenset()
    """Of the host's NUMA nodes those that it is bound to; empty where it is not."""
    cell_nodes: tuple[tuple[int, frozenset[int]], ...] = ()
    """Of cells of the guest to the host's nodes that their memory comes from: `<memnode>`."""


class DomainCpu(Value):
    """What concerns address width and places."""

    count: int
    mode: str | None = None
    physical_bits: int | None = None
    """`<maxphysaddr mode='emulate' bits>`; None where it is left to QEMU or passed through."""
    passes_physical_bits: bool = False
    physical_bits_limit: int | None = None
    """`<maxphysaddr mode='passthrough' limit>`."""
    pins: tuple[tuple[int, frozenset[int]], ...] = ()
    """Of virtual CPUs to those of the host."""
    cells: tuple[NumaCell, ...] = ()
    hides_kvm: bool = False


class DomainIommu(Value):
    """`<iommu>` of the guest."""

    model: str
    has_caching_mode: bool = False
    address_bits: int | None = None
    has_eim: bool = False
    """Extended interrupt mode: identities of CPUs that have 32 bits."""
    is_eim_off: bool = False
    """Whether it says eim='off', which no libvirt overrules."""
    bus: int | None = None
    """`<driver pciBus>` of an smmuv3: the one bus of the guest that it is for."""
    alias: str = ""
    """The name that somebody gave it; libvirt's own is iommu0."""


class Domain(Value):
    """A domain as it is written."""

    source: str
    """The file, or the name of the domain, for messages."""
    name: str
    uuid: str | None
    kind: str
    """`kvm`, `qemu`, …"""
    machine: str | None
    architecture: str | None
    memory: DomainMemory
    cpu: DomainCpu
    firmware: str | None = None
    """`efi`, `bios`; a `<loader type='pflash'>` is `efi`."""
    hostdevs: tuple[DomainHostdev, ...] = ()
    controllers: tuple[PciController, ...] = ()
    taken: tuple[GuestAddress, ...] = ()
    """PCI addresses of all devices that say where they are, controllers and hostdevs too."""
    unplaced: int = 0
    """PCI devices that say nothing of their place, and that libvirt puts behind root ports."""
    own_mappings: int = 0
    """NVMe disks and vDPA interfaces: each locks all memory of the guest for itself."""
    iommu: DomainIommu | None = None
    has_graphics: bool = False
    has_os_boot: bool = False
    """Whether `<os>` has `<boot dev>`."""
    boot_orders: tuple[int, ...] = ()
    """The orders of all devices that have one."""
    qemu_arguments: tuple[str, ...] = ()
    """What it tells QEMU past libvirt: arguments, and properties as -set has them."""
    has_iommufd: bool = False
    is_bound_by_hook: bool = False
    """Whether its metadata has vfiomgr's hook make its devices ready."""
    lines: tuple[tuple[str, int], ...] = ()
    """Where elements stand that are there once, by path: `memtune/hard_limit`."""

    @property
    def is_x86(self) -> bool:
        """Whether it is for a PC; libvirt takes what is not written for the host's."""
        return self.architecture in _X86

    def line(self, path: str) -> int:
        """The line of an element; of one that is not there, that of the domain."""
        known = dict(self.lines)
        return known.get(path, known.get("domain", 1))

    def hostdev(self, name: str) -> DomainHostdev | None:
        """The device with this address or UUID."""
        return next((device for device in self.hostdevs if device.name == name.lower()), None)


class KnownDomain(Value):
    """A domain that libvirt knows: as it runs, and as it is defined."""

    name: str
    uuid: str
    is_active: bool
    running: Domain | None
    defined: Domain | None
    autostarts: bool = False
    """Whether it starts with the host."""
    is_running_unread: bool = False
    """Whether vfiomgr cannot make sense of the XML as it runs: what it has is unknown."""
    is_definition_unread: bool = False
    """Whether it cannot make sense of its definition: what it claims is unknown."""

    @property
    def is_unread(self) -> bool:
        """Whether it may have or claim devices of which nothing is known."""
        return self.is_running_unread or self.is_definition_unread

    @property
    def is_persistent(self) -> bool:
        """Whether it is defined; one that is not is gone when it ends."""
        return self.defined is not None or self.is_definition_unread

    @property
    def argument(self) -> str:
        """Its name as a shell takes it, for commands that are told."""
        return shlex.quote(self.name)

    def devices(self) -> Iterator[tuple[str, DomainHostdev | None, DomainHostdev | None]]:
        """Each device that it has or claims, by name: as it runs, and as it is defined."""
        running, defined = (
            {} if version is None else {h.name: h for h in version.hostdevs if h.name}
            for version in (self.running, self.defined)
        )
        for name in {**running, **defined}:
            yield name, running.get(name), defined.get(name)


class Hypervisor(Value):
    """What a connection to libvirt told of its host."""

    uri: str
    libvirt: Version
    qemu: Version | None
    """None where the driver has none, as that of `test:///`."""
    offers_vfio: bool | None
    """Whether its domain capabilities list vfio; None where it cannot tell."""
    has_kvm: bool | None
    domains: tuple[KnownDomain, ...] = ()


class Feature(Value):
    """Something that can be written since a release of libvirt."""

    what: str
    """As a message names it: `<maxphysaddr>`."""
    since: Version

    def is_in(self, libvirt: Version) -> bool:
        """Whether that libvirt reads it."""
        return libvirt >= self.since

    def require(self, libvirt: Version, why: str) -> None:
        """Make sure that it can be written.

        Raises:
            Refusal: that libvirt is too old; `why` says what it is needed for.

        """
        if not self.is_in(libvirt):
            message = (
                f"{why} needs {self.what}, which libvirt has since {self.since}: this is {libvirt}"
            )
            remedy = f"install libvirt {self.since} or later, or leave it out"
            raise refusal([blocker("libvirt-too-old", self.what, message, remedy)])


UNASSIGNED_ADDRESS = Feature("<address type='unassigned'>", Version(6, 0))
ROOT_PORT_WITHOUT_HOTPLUG = Feature("<target hotplug='off'/> of a root port", Version(6, 3))
FIRMWARE_FEATURES = Feature("<feature> of <firmware>", Version(7, 2))
MDEV_DEFINITION = Feature("nodedev-define of mediated devices", Version(7, 3))
MDEV_AUTOSTART = Feature("nodedev-autostart of mediated devices", Version(7, 8))
QEMU_OVERRIDE = Feature("<qemu:override>", Version(8, 2))
VIRTIO_IOMMU = Feature("<iommu model='virtio'>", Version(8, 3))
MAXPHYSADDR = Feature("<maxphysaddr>", Version(8, 7))
LOCKS_PER_DEVICE = Feature("a limit of locked memory for each device", Version(8, 7))
MAXPHYSADDR_LIMIT = Feature("the limit of <maxphysaddr>", Version(9, 3))
VENDOR_FUNCTION = Feature("a virtual function that stays on its vendor's driver", Version(9, 7))
DRIVER_MODEL = Feature("<driver model>", Version(10, 0))
PCI_DISPLAY = Feature("display and ramfb of PCI devices", Version(10, 3))
ADDS_EIM = Feature("extended interrupt mode by itself, for many CPUs", Version(10, 10))
AMD_IOMMU = Feature("<iommu model='amd'>", Version(11, 5))
ACPI_NODESET = Feature("<acpi nodeset>", Version(11, 8))
IOMMUFD = Feature("<driver iommufd>", Version(12, 1))
DOMAIN_IOMMUFD = Feature("<iommufd> of a domain", Version(12, 2))

QEMU_IOMMUFD = Version(9, 0)
"""The QEMU whose vfio-pci has the property iommufd (IOMMUFDProperties in qapi/qom.json)."""


def lacks_iommufd(qemu: Version | None) -> bool:
    """Whether that QEMU is known to have no iommufd; of one that nobody knows, it is not."""
    return qemu is not None and qemu < QEMU_IOMMUFD
