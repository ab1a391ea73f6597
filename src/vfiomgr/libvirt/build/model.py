"""A guest that somebody requests for, and the plan of its domain: what is written, and why."""

from __future__ import annotations

from typing import Literal

from vfiomgr.libvirt.hostdev import GuestHostdev
from vfiomgr.libvirt.model import DomainIommu, NumaCell, PciController
from vfiomgr.value import Value
from vfiomgr.vgpu.guest_device import DeviceRequest

Firmware = Literal["efi", "bios"]
NumaMode = Literal["strict", "preferred", "off"]
DomainKind = Literal["kvm", "qemu"]
IommuModel = Literal["intel", "virtio", "amd"]
Graphics = Literal["vnc", "none"]
System = Literal["linux", "windows"]
"""What the guest runs: Windows has no virtio drivers of its own, and wants a clock of its own."""
DiskBus = Literal["virtio", "sata"]
NetworkModel = Literal["virtio", "e1000e"]


class GuestDisk(Value):
    """An image or a block device."""

    path: str
    format: str
    bus: DiskBus | None = None
    """None: one that the guest's system has a driver for by itself."""

    @property
    def is_block(self) -> bool:
        """Whether it is a device node."""
        return self.path.startswith("/dev/")


class GuestNetwork(Value):
    """A network of libvirt's by name, or a bridge of the host."""

    kind: Literal["network", "bridge"]
    name: str
    model: NetworkModel | None = None
    """None: one that the guest's system has a driver for by itself."""


class DirectBoot(Value):
    """A kernel of the host's that QEMU starts itself, past all boot loaders."""

    kernel: str
    initrd: str | None = None
    arguments: str | None = None


class DomainRequest(Value):
    """What a user says of a domain; all else follows from the host."""

    name: str
    memory_bytes: int
    vcpus: int
    devices: tuple[DeviceRequest, ...] = ()
    disks: tuple[GuestDisk, ...] = ()
    cdroms: tuple[str, ...] = ()
    """Images or device nodes, in the order of booting: an installer, and drivers beside it."""
    networks: tuple[GuestNetwork, ...] = ()
    boot: tuple[str, ...] = ()
    """`disk`, `cdrom`, `network` or a device's name, in the order of trying."""
    direct_boot: DirectBoot | None = None
    firmware: Firmware = "efi"
    kind: DomainKind = "kvm"
    numa: NumaMode = "strict"
    has_pinning: bool = True
    hugepage_bytes: int | None = None
    viommu: IommuModel | None = None
    graphics: Graphics = "vnc"
    spare_ports: int = 4
    """Root ports that stay free, for devices that are attached later."""
    hard_limit_bytes: int | None = None
    is_locked: bool = False
    has_fixed_aperture: bool = False
    """Whether the size of the 64-bit window is written even where the firmware would find it."""
    address_bits: int | None = None
    """How wide the guest's physical addresses are at most; None for as wide as the host's."""
    has_hotplug: bool = True
    """Whether a guest can be asked for its devices, and offers to eject them."""
    hides_kvm: bool = False
    """Whether it does not show that it runs on KVM, which old drivers look for."""
    system: System = "linux"
    has_tpm: bool = False
    has_secure_boot: bool = False
    """Whether its firmware starts signed systems alone, with the keys of Microsoft enrolled."""

    @property
    def is_windows(self) -> bool:
        """Whether the guest runs Windows."""
        return self.system == "windows"

    def bus_of(self, disk: GuestDisk) -> DiskBus:
        """Where a disk is."""
        return disk.bus or ("sata" if self.is_windows else "virtio")

    def model_of(self, network: GuestNetwork) -> NetworkModel:
        """What an interface is to the guest."""
        return network.model or ("e1000e" if self.is_windows else "virtio")


class Reason(Value):
    """Why a part of the domain is as it is; it cites what was read of the host."""

    part: str
    """`maxphysaddr`, `controller 3`, `hostdev 0000:04:00.0`."""
    text: str


class GuestCell(Value):
    """A NUMA cell of the guest, and the node of the host that it lies on."""

    cell: NumaCell
    host_node: int


class GuestMemory(Value):
    """Where the guest's memory lies, and how much of it QEMU may lock."""

    cells: tuple[GuestCell, ...] = ()
    """Empty where the guest sees one node only."""
    mode: Literal["strict", "preferred"] = "strict"
    host_nodes: tuple[int, ...] = ()
    """That it is bound to; empty where it lies anywhere."""
    locked_bytes: int = 0
    """What QEMU will need to lock, as libvirt counts."""
    hard_limit_bytes: int | None = None


class GuestCpus(Value):
    """The guest's CPUs, those of the host that they run on, and the width of addresses."""

    sockets: int
    cores: int
    """Of a socket."""
    pins: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Of virtual CPUs to those of the host."""
    emulator: tuple[int, ...] = ()
    """The CPUs that QEMU's own threads run on."""
    address_width: Literal["passthrough", "emulate"] | None = None
    """The mode of `<maxphysaddr>`, where it is written."""
    address_bits: int | None = None
    """Its limit, or the width."""
    aperture_mib: int | None = None
    """The size of OVMF's 64-bit window, where it is told."""


class GuestPlan(Value):
    """A whole domain, ready to be written."""

    request: DomainRequest
    controllers: tuple[PciController, ...]
    hostdevs: tuple[GuestHostdev, ...]
    memory: GuestMemory
    cpus: GuestCpus
    iommu: DomainIommu | None
    has_iommufd: bool
    """Whether the domain as a whole uses /dev/iommu, and not each device by itself."""
    boot_orders: tuple[tuple[str, int], ...]
    """Of disks, CD-ROMs and networks, by `disk 0`, `cdrom 0`, `network 0`."""
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]
    """What a user ought to know, and do before the start."""

    def why(self, part: str) -> str:
        """The reason of a part; empty where there is nothing to say."""
        return "; ".join(reason.text for reason in self.reasons if reason.part == part)

    def boot_order(self, part: str) -> int | None:
        """When the firmware tries a part."""
        return dict(self.boot_orders).get(part)
