"""Libvirt domains, as far as devices are concerned.

Line numbers are those of the text that the domain was read from, counted from 1
(formatdomain.html).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Literal

from msgspec.structs import replace

from vfiomgr.expressions import expression
from vfiomgr.guests.model import NO_ROM, AttachOptions, GuestAddress, NumaCell, QemuProperty
from vfiomgr.libvirt.desktop import DomainScreen, SharedMemory
from vfiomgr.pci.model import PciAddress
from vfiomgr.units import Version
from vfiomgr.value import Value

OWN_ALIAS = expression(r"ua-[A-Za-z0-9_-]+")
"""An alias that libvirt keeps: others are replaced by its own (virDomainDeviceInfoParseXML)."""


class DomainHostdev(Value):
    """A host device in a domain: `<hostdev>`, hostdev `<interface>` or NVMe `<disk>`.

    A preflight adds those of `<qemu:arg>`, which libvirt does not know.
    """

    line: int
    kind: Literal["pci", "mdev", "other"]
    element: Literal["hostdev", "interface", "disk", "qemu:arg"] = "hostdev"
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
    acpi_index: int | None = None
    """`<acpi index>`: the N of the name enoN that a guest gives its interface."""
    is_unassigned: bool = False
    """Whether the domain reserves it, but the guest does not get it."""
    disk_target: str | None = None
    """`vda`: the guest disk that uses an NVMe controller of the host."""
    has_rom: bool = True
    """Whether the guest sees its option ROM; false with `<rom bar='off'>` or `enabled='no'`."""
    partner: str | None = None
    """`<teaming type='transient' persistent>`: the alias of the virtio interface that replaces it
    during a migration, for which QEMU unplugs the device."""
    mac: str | None = None
    """`<mac address>` of an interface, which libvirt sets on the virtual function."""

    @property
    def name(self) -> str:
        """The address or the UUID; empty for other kinds."""
        return str(self.address) if self.address is not None else self.uuid or ""

    @property
    def is_seen(self) -> bool:
        """Whether the guest sees the device itself: not an NVMe disk, and not unassigned."""
        return not self.is_unassigned and self.element != "disk"

    def with_options(self, options: AttachOptions, *, is_first: bool = True) -> DomainHostdev:
        """The device with its options; those that can occur once are for its first function."""
        has_rom = options.rom != NO_ROM
        device = replace(
            self,
            managed=options.is_managed,
            is_unassigned=options.is_unassigned,
            iommufd=options.has_iommufd or None,
            has_rom=has_rom and (is_first or options.rom is None),
        )
        if not is_first:
            return device
        return replace(
            device,
            display=options.display,
            ramfb=options.ramfb,
            boot_order=options.boot_order,
            acpi_nodes=options.acpi_nodes,
            acpi_index=options.acpi_index,
            partner=options.partner,
            rom_file=options.rom if has_rom else None,
        )


class TeamedInterface(Value):
    """An interface that stays during a migration, and replaces a device of the host."""

    alias: str
    mac: str | None
    line: int


class GuestHostdev(Value):
    """A host device with its place in the guest; `title` is its name in pci.ids."""

    device: DomainHostdev
    title: str
    properties: tuple[QemuProperty, ...] = ()


ROOT_PORT = "pcie-root-port"
EXPANDER = "pcie-expander-bus"
_X86 = (None, "x86_64", "i686")
TO_PCI = "pcie-to-pci-bridge"
"""Controllers for conventional PCI on a PCI Express machine."""

NAMESPACE = "urn:vfiomgr:libvirt:v1"
"""The namespace of the metadata element that enables the hook for a domain."""


class PciController(Value):
    """`<controller type='pci'>`: a bus of the guest with its index."""

    line: int
    index: int
    model: str
    guest: GuestAddress | None = None
    """The place of the controller itself."""
    bus_nr: int | None = None
    """`<target busNr>` of an expander."""
    numa_node: int | None = None
    has_hotplug: bool = True
    hole64_kib: int | None = None
    reserve_kib: int | None = None
    """`<target memReserve>`: the memory window that firmware keeps behind a free port."""


class DomainMemory(Value):
    """The memory size, and how much of it QEMU may lock."""

    total_bytes: int
    hard_limit_bytes: int | None = None
    is_locked: bool = False
    has_hugepages: bool = False
    hugepage_bytes: tuple[int, ...] = ()
    """The page sizes, if they are written."""
    host_nodes: frozenset[int] = frozenset()
    """The host NUMA nodes that it is bound to; empty if it is not bound."""
    cell_nodes: tuple[tuple[int, frozenset[int]], ...] = ()
    """Guest cells, and the host nodes that their memory comes from: `<memnode>`."""
    current_bytes: int | None = None
    """What a balloon leaves to the guest: `<currentMemory>`."""


KVM_IOAPIC = "<ioapic driver='kvm'/>"
VENDOR_ID = "<hyperv><vendor_id state='on' value='any'/></hyperv>"


class DomainCpu(Value):
    """Address width and CPU placement."""

    count: int
    mode: str | None = None
    physical_bits: int | None = None
    """`<maxphysaddr mode='emulate' bits>`; None if QEMU chooses it or it is passed through."""
    passes_physical_bits: bool = False
    physical_bits_limit: int | None = None
    """`<maxphysaddr mode='passthrough' limit>`."""
    pins: tuple[tuple[int, frozenset[int]], ...] = ()
    """Virtual CPUs, and the host CPUs of each."""
    cells: tuple[NumaCell, ...] = ()
    hides_kvm: bool = False
    hiding: tuple[str, ...] = ()
    """Further elements below `<features>` that old drivers of NVIDIA need on KVM."""


class DomainIommu(Value):
    """`<iommu>` of the guest."""

    model: str
    has_caching_mode: bool = False
    address_bits: int | None = None
    has_eim: bool = False
    """Extended interrupt mode: CPU identifiers of 32 bits."""
    translates_dma: bool = True
    """Whether it has no dma_translation='off', with which it only remaps interrupts."""
    is_eim_off: bool = False
    """Whether it has eim='off', which libvirt never overrides."""
    is_accelerated: bool = False
    """Whether it has accel='on': the host's SMMU translates."""
    bus: int | None = None
    """`<driver pciBus>` of an smmuv3: the one guest bus that it serves."""
    alias: str = ""
    """A user-defined name; libvirt's own is iommu0."""
    line: int = 0
    """Its line in the document; 0 for a new one."""


class DomainLaunch(Value):
    """`<launchSecurity>`, and the parts of the domain that it depends on."""

    line: int
    kind: str
    """`tdx`, `sev-snp`, `sev`, `s390-pv`."""
    has_smm: bool = False
    """`<smm state='on'>`."""
    has_pmu: bool | None = None
    """`<pmu state>`; None if it is not written."""
    interrupts: str | None = None
    """`<ioapic driver>`: `qemu` splits the interrupt controller."""
    loader: str | None = None
    """`<loader type>`: `rom` or `pflash`."""
    has_kernel: bool = False
    """Whether QEMU starts a kernel without a boot loader."""
    memory_devices: tuple[tuple[int, str], ...] = ()
    """Lines and models of `<memory>` below `<devices>`: `dimm`, `virtio-mem`."""
    memory_slots: int = 0
    """`<maxMemory slots>`: how many memory devices can be added while it runs."""
    shares_memory: bool = False
    """Whether other processes may map its memory: `<access mode='shared'>` or `memAccess`."""
    is_preallocated: bool = False
    """`<allocation mode='immediate'>`."""


class HookSettings(Value):
    """What vfiomgr's hook does for a domain, as its metadata say."""

    release: bool = False
    """The desktop releases displays before they are bound (`vfiomgr bind --release`)."""
    end_sessions: bool = False
    """With `release`: end sessions even if their compositor could close the display."""
    isolate_cpus: bool = False
    """The host's processes leave the CPUs that the guest is pinned to."""
    hugepages: bool = False
    """The huge pages of the guest are allocated, and freed when it ends."""
    interrupts: bool = False
    """Interrupts of the guest's functions are kept on the CPUs that it is pinned to."""


class Domain(Value):
    """A domain as written."""

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
    """`efi` or `bios`; a `<loader type='pflash'>` is `efi`."""
    hostdevs: tuple[DomainHostdev, ...] = ()
    controllers: tuple[PciController, ...] = ()
    taken: tuple[GuestAddress, ...] = ()
    """PCI addresses of all devices that have one, including controllers and hostdevs."""
    unplaced: int = 0
    """PCI devices without an address, which libvirt puts behind root ports."""
    own_mappings: int = 0
    """NVMe disks and vDPA interfaces: each locks all guest memory for itself."""
    iommus: tuple[DomainIommu, ...] = ()
    """Several only if each serves one bus (smmuv3)."""
    launch: DomainLaunch | None = None
    """None for an ordinary guest."""
    teamed: tuple[TeamedInterface, ...] = ()
    """Virtio interfaces with `<teaming type='persistent'>`."""
    has_graphics: bool = False
    has_os_boot: bool = False
    """Whether `<os>` has `<boot dev>`."""
    boot_orders: tuple[int, ...] = ()
    """The boot orders of all devices that have one."""
    qemu_arguments: tuple[str, ...] = ()
    """Its own QEMU arguments, with properties as -set has them."""
    command_line: tuple[str, ...] = ()
    """The arguments of `<qemu:commandline>`."""
    has_json_devices: bool = True
    """Whether libvirt may write devices as JSON: no `<qemu:del capability='device.json'>`."""
    shared_memory: tuple[SharedMemory, ...] = ()
    screen: DomainScreen = DomainScreen()
    is_confined: bool = True
    """Whether a security driver confines its QEMU: no `<seclabel type='none'>`."""
    has_iommufd: bool = False
    iommufd_group: str | None = None
    """`<iommufd fdgroup>`: the name under which a program passes /dev/iommu to libvirt."""
    hook: HookSettings | None = None
    """What its metadata enables vfiomgr's hook for; None if it does not."""
    lines: tuple[tuple[str, int], ...] = ()
    """Lines of elements that occur once, by path: `memtune/hard_limit`."""

    @property
    def is_bound_by_hook(self) -> bool:
        """Whether its metadata enables vfiomgr's hook."""
        return self.hook is not None

    @property
    def is_x86(self) -> bool:
        """Whether it is for a PC; libvirt uses the host's architecture if none is written."""
        return self.architecture in _X86

    @property
    def whole_iommu(self) -> DomainIommu | None:
        """The IOMMU that serves all devices, and not those of one bus."""
        return next((iommu for iommu in self.iommus if iommu.bus is None), None)

    def interface_of(self, hostdev: DomainHostdev) -> TeamedInterface | None:
        """The interface that replaces a device during a migration."""
        return next((one for one in self.teamed if one.alias == hostdev.partner), None)

    def line(self, path: str) -> int:
        """The line of an element; for a missing one, that of the domain."""
        known = dict(self.lines)
        return known.get(path, known.get("domain", 1))

    def hostdev(self, name: str) -> DomainHostdev | None:
        """The device with this address or UUID."""
        return next((device for device in self.hostdevs if device.name == name.lower()), None)


class KnownDomain(Value):
    """A domain in libvirt: as it runs, and as it is defined."""

    name: str
    uuid: str
    is_active: bool
    running: Domain | None
    defined: Domain | None
    autostarts: bool = False
    """Whether it starts with the host."""
    is_running_unread: bool = False
    """Whether vfiomgr cannot read the running XML: the devices in use are unknown."""
    is_definition_unread: bool = False
    """Whether vfiomgr cannot read the definition: the claimed devices are unknown."""

    @property
    def is_unread(self) -> bool:
        """Whether it may have or claim unknown devices."""
        return self.is_running_unread or self.is_definition_unread

    @property
    def is_persistent(self) -> bool:
        """Whether it is defined; a transient domain disappears when it ends."""
        return self.defined is not None or self.is_definition_unread

    @property
    def argument(self) -> str:
        """Its name, quoted for a shell, for commands in messages."""
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
    """What a connection to libvirt reports about its host."""

    uri: str
    libvirt: Version
    qemu: Version | None
    """None for a driver without a hypervisor, such as `test:///`."""
    offers_vfio: bool | None
    """Whether its domain capabilities list vfio; None if unknown."""
    has_kvm: bool | None
    domains: tuple[KnownDomain, ...] = ()
