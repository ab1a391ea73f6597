"""A guest as requested, and its plan: its devices and their places, memory and CPUs, and why."""

from __future__ import annotations

from typing import Annotated, Literal

from vfiomgr.cli.keywords import Keywords, Option
from vfiomgr.pci.model import PciDevice
from vfiomgr.value import Value
from vfiomgr.vgpu.model import Vgpu

Firmware = Literal["efi", "bios"]
NumaMode = Literal["strict", "preferred", "off"]
Architecture = Literal["x86_64", "aarch64"]
Acceleration = Literal["kvm", "qemu"]
"""Whether the host's CPU runs the guest (KVM), or QEMU emulates one."""
IommuModel = Literal["intel", "virtio", "amd", "smmuv3"]
BusKind = Literal["root", "root-port", "expander", "bridge"]
PAGES = {
    "64K": 64 << 10,
    "2M": 2 << 20,
    "32M": 32 << 20,
    "512M": 512 << 20,
    "1G": 1 << 30,
    "16G": 16 << 30,
}
"""Sizes of huge pages. x86 has 2M and 1G; on ARM the size of the kernel's own pages determines
which exist (Documentation/arch/arm64/hugetlbpage.rst)."""


HOST_FILE = "snapshot.completion:complete_host_file"
"""What completes an option with a file of the host."""
NO_ROM = "off"
"""As the path of an option ROM: the guest sees no ROM."""


class DeviceOptions(Keywords, total=False):
    """How a device is given to a guest; every option may be omitted."""

    managed: Annotated[
        bool, Option("Let libvirt bind and unbind, instead of vfiomgr.", field="is_managed")
    ]
    display: Annotated[bool, Option("Show the vGPU's display in <graphics>.")]
    ramfb: Annotated[bool, Option("Show a framebuffer until the guest loads its driver.")]
    rom: Annotated[
        str | None,
        Option("Set its option ROM; off disables it.", metavar="FILE|off", complete=HOST_FILE),
    ]
    boot_order: Annotated[int | None, Option("Set its boot order.", metavar="N", least=1)]
    driver_model: Annotated[
        str | None,
        Option(
            "Let libvirt bind it to this VFIO driver (libvirt 10.0).",
            metavar="DRIVER",
            word="model",
            complete="snapshot.completion:complete_vfio_driver",
        ),
    ]
    iommufd: Annotated[
        bool | None, Option("Use /dev/iommu (libvirt 12.1), or VFIO groups.", field="has_iommufd")
    ]
    unassigned: Annotated[
        bool, Option("Only detach it from the host, for its IOMMU group.", field="is_unassigned")
    ]
    acpi_nodes: Annotated[
        str | None,
        Option("Add memoryless guest cells, e.g. 1-8 (libvirt 11.8; GB200).", metavar="CELLS"),
    ]
    acpi_index: Annotated[
        int | None,
        Option(
            "Let the guest name its interface enoN (libvirt 7.3).",
            metavar="N",
            least=1,
            most=16383,
        ),
    ]
    teaming: Annotated[
        str | None,
        Option(
            "Replace it by this virtio interface for migrations (libvirt 7.1).",
            metavar="ALIAS",
            field="partner",
        ),
    ]


class DeviceWords(DeviceOptions, total=False):
    """What can follow the name of a device: `04:00.0,vga,rom=/gpu.rom`."""

    only: bool
    vga: Annotated[bool, Option(field="has_vga")]
    subsystem: Annotated[str, Option(metavar="VENDOR:DEVICE")]
    vf_token: Annotated[str, Option(metavar="UUID")]
    ats: Annotated[str, Option(metavar="on|off")]


class AttachOptions(Value):
    """How a device is assigned to a guest: the fields that `DeviceWords` describes."""

    is_managed: bool = False
    """Whether libvirt binds and unbinds it."""
    display: bool = False
    """Whether QEMU shows the vGPU's own display."""
    ramfb: bool = False
    """Whether QEMU shows a boot framebuffer until the guest's driver is loaded."""
    rom: str | None = None
    """An absolute path, or NO_ROM."""
    boot_order: int | None = None
    driver_model: str | None = None
    """The VFIO driver that libvirt binds the device to."""
    has_iommufd: bool = False
    """Whether QEMU opens the device through /dev/iommu."""
    is_unassigned: bool = False
    """Whether libvirt detaches the device from the host without assigning it to the guest."""
    acpi_nodes: str | None = None
    """NUMA cells of the guest for the device's own memory: `1-8`."""
    acpi_index: int | None = None
    """The number of an onboard device that the guest's firmware reports (hw/pci/pci.c of QEMU)."""
    has_vga: bool = False
    """Whether the device handles the legacy VGA addresses, for SeaBIOS."""
    subsystem: str | None = None
    """The subsystem ID that the guest sees, `17aa:3aff`, if a driver requires it."""
    partner: str | None = None
    """The alias of the virtio interface that replaces it during a migration."""
    vf_token: str | None = None
    """The UUID that users of a physical function on VFIO and of its virtual functions share."""
    ats: str | None = None
    """Whether the guest sees its ATS: `on` or `off`; None if the kernel decides."""


class DeviceRequest(Value):
    """A host device by address or UUID, as the user wrote it."""

    name: str
    options: AttachOptions = AttachOptions()
    is_alone: bool = False
    """Whether the other functions of its slot are excluded."""


class GuestDevice(Value):
    """One device of a guest; a mediated device has no `functions`."""

    functions: tuple[PciDevice, ...]
    vgpu: Vgpu | None
    model: str | None
    """The hostdev model of a mediated device."""
    options: AttachOptions
    is_vendor_function: bool
    """Whether it is a vGPU that stays on its vendor's driver."""
    numa_node: int | None
    root_complex: str | None
    """`pci0000:40`; None if the parent is not a PCI function."""
    iommu_group: int | None
    has_groups: bool = True
    """Whether the kernel has a node for its IOMMU group (CONFIG_VFIO_GROUP)."""

    @property
    def is_seen(self) -> bool:
        """Whether the guest sees the device, not only the domain."""
        return not self.options.is_unassigned

    @property
    def name(self) -> str:
        """The address of its first function, or the UUID."""
        return str(self.functions[0].address) if self.functions else self.vgpu_uuid

    @property
    def vgpu_uuid(self) -> str:
        """The UUID of a mediated device."""
        return (self.vgpu.uuid if self.vgpu is not None else None) or ""

    @property
    def function_names(self) -> tuple[str, ...]:
        """The addresses of its functions, or the UUID."""
        return tuple(str(device.address) for device in self.functions) or (self.vgpu_uuid,)

    @property
    def names(self) -> str:
        """All of its functions, or the UUID."""
        return ", ".join(self.function_names)


class QemuProperty(Value):
    """A property of QEMU's device of a host."""

    name: str
    type: Literal["bool", "unsigned", "string"]
    value: str


class GuestAddress(Value, order=True):
    """Where a function sits in the guest; `bus` is the number of a bus of the plan."""

    bus: int
    slot: int
    function: int
    multifunction: bool = False
    domain: int = 0

    @property
    def device(self) -> tuple[int, int, int]:
        """Domain, bus and slot, which all functions of one device share."""
        return (self.domain, self.bus, self.slot)


class NumaCell(Value):
    """A NUMA node of the guest."""

    number: int
    memory_bytes: int
    cpus: frozenset[int] = frozenset()


class GuestRequest(Value):
    """What a user asks for in a guest; everything else follows from the host."""

    name: str
    memory_bytes: int
    vcpus: int
    devices: tuple[DeviceRequest, ...] = ()
    firmware: Firmware = "efi"
    kind: Acceleration = "kvm"
    numa: NumaMode = "strict"
    has_pinning: bool = True
    has_own_cpus: bool = False
    """Whether each virtual CPU runs on one CPU of the host, which no other one uses."""
    hugepage_bytes: int | None = None
    viommu: IommuModel | None = None
    spare_ports: int = 4
    """Free root ports, for devices that are attached later."""
    has_fixed_aperture: bool = False
    """Whether to write the size of the 64-bit window even if the firmware would find it."""
    address_bits: int | None = None
    """The maximum width of guest physical addresses; None for that of the host."""
    has_hotplug: bool = True
    """Whether devices can be hot-unplugged, so that the guest offers to eject them."""


class Reason(Value):
    """Why a part of the guest is as it is, citing facts of the host."""

    part: str
    """`window`, `bus 3`, `device 0000:04:00.0`."""
    text: str


class GuestBus(Value):
    """A bus of the guest, and the port, expander or bridge that it is behind."""

    number: int
    """Its position in the plan, to which addresses refer; not the number that the guest sees."""
    kind: BusKind
    place: GuestAddress | None = None
    """Where the port or bridge itself sits; None for any free slot of the root."""
    first_number: int | None = None
    """The number that the guest sees, of the bus of an expander."""
    cell: int | None = None
    """The NUMA cell of an expander."""
    has_hotplug: bool = True
    reserve_bytes: int | None = None
    """The 32-bit memory that firmware keeps behind a free port."""


class GuestCell(Value):
    """A NUMA cell of the guest, and the host node that its memory comes from."""

    cell: NumaCell
    host_node: int


class GuestMemory(Value):
    """Where the guest's memory comes from, and how much of it QEMU may lock."""

    cells: tuple[GuestCell, ...] = ()
    """Empty if the guest sees only one node."""
    mode: Literal["strict", "preferred"] = "strict"
    host_nodes: tuple[int, ...] = ()
    """The host nodes that memory is bound to; empty if it is not bound."""
    locked_bytes: int = 0
    """How much memory QEMU will need to lock."""


class GuestCpus(Value):
    """The guest's CPUs, and the host CPUs that they run on."""

    sockets: int
    cores: int
    """Cores per socket."""
    threads: int = 1
    """Threads per core."""
    pins: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Virtual CPUs, and the host CPUs of each."""
    emulator: tuple[int, ...] = ()
    """The host CPUs for QEMU's own threads."""


class MmioWindow(Value):
    """The window for large BARs, and the parts of it that must be set."""

    address_bits: int | None = None
    """The width of the guest's physical addresses; None if it is unknown."""
    hole_bytes: int | None = None
    """The size of QEMU's own window, if the default is too small (SeaBIOS)."""
    firmware_mib: int | None = None
    """The size of OVMF's window in MiB, if the default is too small."""


class GuestPlan(Value):
    """A guest, as every virtual machine monitor can write it."""

    architecture: Architecture
    devices: tuple[GuestDevice, ...]
    buses: tuple[GuestBus, ...]
    places: dict[str, GuestAddress]
    """Where the first function of each device sits, by name; others follow in its slot."""
    memory: GuestMemory
    cpus: GuestCpus
    window: MmioWindow
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()
    """What a user should know, and do before the start."""

    @property
    def seen(self) -> tuple[GuestDevice, ...]:
        """The devices that the guest sees."""
        return tuple(device for device in self.devices if device.is_seen)
