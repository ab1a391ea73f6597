"""A guest as requested, and the plan of its domain: what to write, and why."""

from __future__ import annotations

from typing import Literal

from vfiomgr.guests.model import Architecture, GuestCpus, GuestMemory, GuestRequest, Reason
from vfiomgr.libvirt.desktop import EvdevInput, GuestAudio, LookingGlass, UsbDevice
from vfiomgr.libvirt.model import DomainIommu, GuestHostdev, PciController
from vfiomgr.value import Value

LaunchSecurity = Literal["tdx", "sev-snp"]
"""Kinds of confidential guests: Intel's trust domains, and AMD's SEV-SNP."""
Graphics = Literal["vnc", "spice", "none"]
Video = Literal["vga", "none"]
System = Literal["linux", "windows"]
"""The guest's system: Windows lacks virtio drivers and needs a different clock."""
DiskBus = Literal["virtio", "sata"]
NetworkModel = Literal["virtio", "e1000e"]


class GuestDisk(Value):
    """An image or a block device."""

    path: str
    format: str
    bus: DiskBus | None = None
    """None for a bus that the guest's system has a driver for."""

    @property
    def is_block(self) -> bool:
        """Whether it is a device node."""
        return self.path.startswith("/dev/")


class GuestNetwork(Value):
    """A libvirt network by name, or a bridge of the host."""

    kind: Literal["network", "bridge"]
    name: str
    model: NetworkModel | None = None
    """None for a model that the guest's system has a driver for."""
    alias: str | None = None
    mac: str | None = None
    """If None, libvirt generates one."""


class DirectBoot(Value):
    """A kernel on the host that QEMU starts directly, without a boot loader."""

    kernel: str
    initrd: str | None = None
    arguments: str | None = None


class DomainRequest(GuestRequest):
    """What a user asks for in a domain."""

    disks: tuple[GuestDisk, ...] = ()
    cdroms: tuple[str, ...] = ()
    """Images or device nodes in boot order, e.g. an installer and a driver disk."""
    networks: tuple[GuestNetwork, ...] = ()
    boot: tuple[str, ...] = ()
    """`disk`, `cdrom`, `network` or a device name, in boot order."""
    direct_boot: DirectBoot | None = None
    has_ats: bool | None = None
    """Whether the virtual IOMMU offers ATS; None if QEMU decides (SMMUv3), else it does (VT-d)."""
    pasid_bits: int | None = None
    """The width of PASIDs of the virtual IOMMU, 0 for none; None if QEMU decides."""
    translates_dma: bool = True
    """Whether the virtual IOMMU translates DMA; false if it is only for interrupts."""
    graphics: Graphics = "vnc"
    video: Video | None = None
    """The emulated graphics card; None for one beside `graphics`."""
    is_desktop: bool = False
    """Whether the user left the choice of what follows to `--desktop`."""
    looking_glass: LookingGlass | None = None
    """What shares the guest's frames with a window of the host."""
    evdev: tuple[EvdevInput, ...] = ()
    """Keyboards and mice of the host that host and guest use in turns."""
    audio: GuestAudio | None = None
    """None for a guest without a sound card."""
    usb: tuple[UsbDevice, ...] = ()
    """USB devices of the host that the guest gets if they are plugged in at its start."""
    hard_limit_bytes: int | None = None
    is_locked: bool = False
    hides_kvm: bool = False
    """Whether the guest hides KVM, which old drivers look for."""
    system: System = "linux"
    launch_security: LaunchSecurity | None = None
    """The kind of a confidential guest; None for an ordinary one."""
    has_tpm: bool = False
    has_secure_boot: bool = False
    """Whether the firmware starts only signed systems, with Microsoft's keys enrolled."""

    @property
    def has_sound(self) -> bool:
        """Whether the guest has a sound card."""
        return self.audio is not None and self.audio.kind != "none"

    @property
    def is_windows(self) -> bool:
        """Whether the guest runs Windows."""
        return self.system == "windows"

    def bus_of(self, disk: GuestDisk) -> DiskBus:
        """The bus of a disk."""
        return disk.bus or ("sata" if self.is_windows else "virtio")

    def model_of(self, network: GuestNetwork) -> NetworkModel:
        """The model of a network interface."""
        return network.model or ("e1000e" if self.is_windows else "virtio")


class DomainCpus(GuestCpus):
    """The guest's CPUs, and the address width that libvirt writes."""

    needs_topoext: bool = False
    """Whether several threads of a core need a CPU feature of AMD that QEMU leaves out."""
    address_width: Literal["passthrough", "emulate"] | None = None
    """The mode of `<maxphysaddr>`, if it is written."""
    address_bits: int | None = None
    """Its limit, or the width."""
    aperture_mib: int | None = None
    """The size of OVMF's 64-bit window, if it is set."""


class DomainPlan(Value):
    """A complete domain, ready to be written."""

    request: DomainRequest
    controllers: tuple[PciController, ...]
    hostdevs: tuple[GuestHostdev, ...]
    memory: GuestMemory
    hard_limit_bytes: int | None
    """The limit of locked memory, if it is written."""
    cpus: DomainCpus
    iommu: DomainIommu | None
    has_iommufd: bool
    """Whether the entire domain uses /dev/iommu, instead of single devices."""
    boot_orders: tuple[tuple[str, int], ...]
    """Boot orders of disks, CD-ROMs and networks, by `disk 0`, `cdrom 0`, `network 0`."""
    reasons: tuple[Reason, ...]
    architecture: Architecture = "x86_64"
    smmus: tuple[DomainIommu, ...] = ()
    """The SMMUv3s of an ARM guest, one for each root complex of its devices."""
    hyperv: tuple[str, ...] = ()
    """The Hyper-V interfaces of a Windows guest that this libvirt has."""
    notes: tuple[str, ...] = ()
    """What a user should know, and do before the start."""

    @property
    def has_io_thread(self) -> bool:
        """Whether disks have a thread of their own, apart from the CPUs of the guest."""
        is_virtio = any(self.request.bus_of(disk) == "virtio" for disk in self.request.disks)
        return is_virtio and self.request.has_own_cpus and bool(self.cpus.pins)

    @property
    def partners(self) -> frozenset[str]:
        """The aliases of interfaces that replace a device during a migration."""
        return frozenset(h.device.partner for h in self.hostdevs if h.device.partner is not None)

    @property
    def is_arm(self) -> bool:
        """Whether it is for an ARM server."""
        return self.architecture == "aarch64"

    @property
    def cdrom_bus(self) -> Literal["sata", "scsi"]:
        """The bus of CD-ROMs: machine virt has no SATA."""
        return "scsi" if self.is_arm else "sata"

    def why(self, part: str) -> str:
        """The reason for a part; empty if there is none."""
        return "; ".join(reason.text for reason in self.reasons if reason.part == part)

    def boot_order(self, part: str) -> int | None:
        """The boot order of a part."""
        return dict(self.boot_orders).get(part)
