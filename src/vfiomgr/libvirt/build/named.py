"""A guest as users describe it: `--device NAME,display`, `--disk FILE,format=raw`, `16G`.

Every function raises UsageError for an option that it cannot read.
"""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Required, TypedDict, get_args

from vfiomgr.errors import UsageError, forbid_alone, require_choice, require_whole
from vfiomgr.expressions import expression
from vfiomgr.guests import named
from vfiomgr.guests.model import (
    PAGES,
    Acceleration,
    AttachOptions,
    DeviceRequest,
    Firmware,
    IommuModel,
    NumaMode,
)
from vfiomgr.guests.named import memory_bytes
from vfiomgr.libvirt.build.model import (
    DirectBoot,
    DiskBus,
    DomainRequest,
    Graphics,
    GuestDisk,
    GuestNetwork,
    LaunchSecurity,
    NetworkModel,
    System,
)
from vfiomgr.libvirt.model import OWN_ALIAS

if TYPE_CHECKING:
    from collections.abc import Iterable

_DEVICE_KEYS = (
    "managed",
    "unassigned",
    "display",
    "ramfb",
    "vga",
    "only",
    "rom",
    "model",
    "subsystem",
    "vf-token",
    "teaming",
    "ats",
)
_SUFFIXES = {".qcow2": "qcow2", ".raw": "raw", ".img": "raw", ".vmdk": "vmdk", ".vdi": "vdi"}
FORMATS = ("qcow2", "raw", "qcow", "qed", "vdi", "vmdk", "vpc")
"""Formats that QEMU writes and libvirt has a name for (virStorageFileFormat)."""
_NETWORK = expression(r"[^/\s\x00-\x1f][^/\x00-\x1f]*")
_BRIDGE = expression(r"[A-Za-z0-9_.\-\\:/]+")
"""deviceName of libvirt's schema (basictypes.rng)."""
_BUSES: dict[str, DiskBus] = {"virtio": "virtio", "sata": "sata"}
_MODELS: dict[str, NetworkModel] = {"virtio": "virtio", "e1000e": "e1000e"}
_NETWORK_OPTIONS = {
    "model": expression("|".join(_MODELS)),
    "alias": OWN_ALIAS,
    "mac": expression(r"[0-9a-fA-F][02468aceACE](:[0-9a-fA-F]{2}){5}"),
}
"""A MAC address of one interface is even in its first byte."""


def parse_device(text: str, *, has_iommufd: bool = False) -> DeviceRequest:
    """Parse `0000:04:00.0,rom=/x.rom`: a name, then options."""
    return named.parse_device(text, "--device", _DEVICE_KEYS, has_iommufd=has_iommufd)


def parse_disk(text: str) -> GuestDisk:
    """Parse `/vm/root.qcow2`, `/dev/vg/root`, `/vm/disk,format=raw,bus=sata`.

    The format is never guessed from the contents of a file: a guest could write another one there.
    """
    path, *words = text.split(",")
    options = dict(word.partition("=")[::2] for word in words)
    known = "raw" if path.startswith("/dev/") else _SUFFIXES.get(os.path.splitext(path)[1])
    for key, value in options.items():
        if key not in ("format", "bus") or not value or (key == "bus" and value not in _BUSES):
            message = f"invalid option in --disk {text}: {f'{key}={value}'.rstrip('=')!r}"
            raise UsageError(
                message, "write --disk FILE, then format=qcow2, bus=virtio or bus=sata"
            )
    given = options.get("format") or known
    if given is None:
        message = f"cannot derive the disk format from the name: --disk {text}"
        raise UsageError(message, f"write --disk {shlex.quote(path)},format=raw or format=qcow2")
    if given not in FORMATS:
        message = f"libvirt does not support disk format {given}: --disk {text}"
        converted = f"qemu-img convert -O qcow2 {shlex.quote(path)} disk.qcow2"
        raise UsageError(message, f"use one of {', '.join(FORMATS)}; convert with: {converted}")
    return GuestDisk(os.path.abspath(path), given, _BUSES.get(options.get("bus", "")))


def parse_direct_boot(
    kernel: str | None, initrd: str | None, arguments: str | None
) -> DirectBoot | None:
    """The kernel that QEMU starts directly."""
    if kernel is not None:
        place = None if initrd is None else os.path.abspath(initrd)
        return DirectBoot(os.path.abspath(kernel), place, arguments)
    for option, value in (("--initrd", initrd), ("--kernel-arguments", arguments)):
        if value is not None:
            forbid_alone(option, "--kernel", "without a kernel the boot loader sets them")
    return None


def parse_network(text: str) -> GuestNetwork:
    """Parse a libvirt network, or `bridge=br0`; `,model=e1000e,alias=ua-net0,mac=…` may follow."""
    place, *words = text.split(",")
    options = dict(word.partition("=")[::2] for word in words)
    key, equals, name = place.partition("=")
    is_bridge = key == "bridge" and _BRIDGE.fullmatch(name) is not None
    is_network = _NETWORK.fullmatch(place) is not None
    is_known = all(
        name in _NETWORK_OPTIONS and _NETWORK_OPTIONS[name].fullmatch(value)
        for name, value in options.items()
    )
    if not (is_bridge or is_network) or (equals and not is_bridge) or not is_known:
        message = f"invalid network: --network {text!r}"
        hint = (
            "write the name of a libvirt network, or bridge=br0; ,model=virtio or ,model=e1000e "
            "may follow, and for teaming ,alias=ua-NAME,mac=52:54:00:12:34:56"
        )
        raise UsageError(message, hint)
    return GuestNetwork(
        "bridge" if is_bridge else "network",
        name or place,
        _MODELS.get(options.get("model", "")),
        options.get("alias"),
        options.get("mac", "").lower() or None,
    )


SPARE_PORTS, MOST_SPARE_PORTS = 4, 64
MOST_VCPUS = 4096
ADDRESS_BITS = (32, 52)
PASID_BITS = (0, 20)


class DomainOptions(TypedDict, total=False):
    """A guest; only its memory and its CPUs are required."""

    memory: Required[str]
    """With its unit: `16G`, `16384M`."""
    vcpus: Required[int]
    """More than 255 need libvirt 10.7, or `viommu="intel"`."""
    system: System
    """The guest's system: `linux`, or `windows`, with its clock, Hyper-V and supported disks."""
    launch_security: LaunchSecurity | None
    """A confidential guest: `tdx` (libvirt 11.6) or `sev-snp` (libvirt 10.5)."""
    tpm: bool
    """An emulated TPM 2.0 (swtpm)."""
    secure_boot: bool
    """Start only signed systems, with Microsoft's keys enrolled; Windows gets a TPM."""
    hide_kvm: bool
    """Hide KVM from drivers that refuse to run on it (NVIDIA's before 465)."""
    disks: Iterable[str]
    """`FILE[,format=F][,bus=B]`: images or block devices; bus is virtio or sata."""
    cdroms: Iterable[str]
    """Images to install from."""
    networks: Iterable[str]
    """A libvirt network `NAME` or `bridge=BR`; `,model=`, `,alias=` and `,mac=` may follow."""
    boot: Iterable[str]
    """`disk`, `cdrom`, `network` or a device, in boot order.  [disk, cdrom]"""
    kernel: str | None
    """A file on the host, started without a boot loader."""
    initrd: str | None
    """The initial RAM disk of `kernel`."""
    kernel_arguments: str | None
    """The command line of `kernel`."""
    firmware: Firmware
    """`efi` (OVMF) or `bios` (SeaBIOS).  [efi]"""
    virt_type: Acceleration
    """`kvm` or `qemu`.  [kvm]"""
    graphics: Graphics
    """`vnc`, on 127.0.0.1, or `none`.  [vnc]"""
    spare_ports: int
    """Free root ports, to attach devices later: 0 to 64.  [4]"""
    devices: Iterable[str]
    """Addresses and UUIDs; `,managed`, `,rom=FILE` and so on may follow, as for `--device`."""
    no_hotplug: bool
    """Disable hot-plug for the devices' ports, so that Windows does not offer to eject them."""
    numa: NumaMode
    """Bind memory to the NUMA nodes of the devices: `strict`, `preferred` or `off`.  [strict]"""
    no_pinning: bool
    """Let the CPUs run anywhere."""
    hugepages: str | None
    """`2M`, `1G` or another of `PAGES`: use huge pages of the host."""
    viommu: IommuModel | None
    """A virtual IOMMU, for nested virtualization."""
    ats: bool | None
    """Whether that of Intel or the SMMUv3 offers ATS."""
    pasid_bits: int | None
    """The width of PASIDs of an SMMUv3: 0 to 20; 0 for none."""
    iommufd: bool | None
    """Use /dev/iommu for the devices (libvirt 12.1); None to use it where the host has it."""
    address_bits: int | None
    """Maximum width of physical addresses: 32 to 52."""
    fixed_aperture: bool
    """Write the size of the window for large BARs; OVMF before 2022.11 needs it."""
    hard_limit: str | None
    """The maximum memory that QEMU may use and lock, with its unit."""
    locked: bool
    """Lock all guest memory, without a limit."""


def request_of(name: str, said: DomainOptions) -> DomainRequest:
    """The guest that a user asks for.

    Raises:
        UsageError: an option has an invalid value.

    """
    pages, limit = said.get("hugepages"), said.get("hard_limit")
    _require_known(said)
    has_iommufd = _iommufd(said)
    system = said.get("system", "linux")
    has_secure_boot = said.get("secure_boot", False)
    return DomainRequest(
        name=name,
        memory_bytes=memory_bytes("--memory", said["memory"]),
        vcpus=said["vcpus"],
        devices=tuple(parse_device(d, has_iommufd=has_iommufd) for d in said.get("devices", ())),
        disks=tuple(map(parse_disk, said.get("disks", ()))),
        cdroms=tuple(map(os.path.abspath, said.get("cdroms", ()))),
        networks=tuple(map(parse_network, said.get("networks", ()))),
        boot=tuple(said.get("boot", ())),
        direct_boot=parse_direct_boot(
            said.get("kernel"), said.get("initrd"), said.get("kernel_arguments")
        ),
        firmware=said.get("firmware", "efi"),
        kind=said.get("virt_type", "kvm"),
        numa=said.get("numa", "strict"),
        has_pinning=not said.get("no_pinning", False),
        hugepage_bytes=None if pages is None else PAGES[pages],
        viommu=said.get("viommu"),
        has_ats=said.get("ats"),
        pasid_bits=said.get("pasid_bits"),
        graphics=said.get("graphics", "vnc"),
        spare_ports=said.get("spare_ports", SPARE_PORTS),
        hard_limit_bytes=None if limit is None else memory_bytes("--hard-limit", limit),
        is_locked=said.get("locked", False),
        has_fixed_aperture=said.get("fixed_aperture", False),
        address_bits=said.get("address_bits"),
        has_hotplug=not said.get("no_hotplug", False),
        hides_kvm=said.get("hide_kvm", False),
        system=system,
        launch_security=said.get("launch_security"),
        has_tpm=said.get("tpm", False) or (has_secure_boot and system == "windows"),
        has_secure_boot=has_secure_boot,
    )


def _iommufd(said: DomainOptions) -> bool:
    """Whether devices use iommufd, which an accelerated SMMUv3 needs.

    Raises:
        UsageError: the SMMUv3 is requested without it.

    """
    asked, viommu = said.get("iommufd"), said.get("viommu")
    if viommu == "smmuv3" and asked is False:
        message = "cannot use --viommu smmuv3 with VFIO groups: it needs iommufd"
        raise UsageError(message, "omit --no-iommufd")
    return asked or viommu == "smmuv3"


def _require_known(said: DomainOptions) -> None:
    """Make sure that words and numbers are among the allowed values."""
    require_whole("--vcpus", said["vcpus"], 1, MOST_VCPUS)
    require_whole("--spare-ports", said.get("spare_ports"), 0, MOST_SPARE_PORTS)
    require_whole("--address-bits", said.get("address_bits"), *ADDRESS_BITS)
    require_whole("--pasid-bits", said.get("pasid_bits"), *PASID_BITS)
    require_choice("--hugepages", said.get("hugepages"), tuple(PAGES))
    require_choice("--firmware", said.get("firmware"), get_args(Firmware))
    require_choice("--virt-type", said.get("virt_type"), get_args(Acceleration))
    require_choice("--numa", said.get("numa"), get_args(NumaMode))
    require_choice("--viommu", said.get("viommu"), get_args(IommuModel))
    require_choice("--launch-security", said.get("launch_security"), get_args(LaunchSecurity))
    require_choice("--graphics", said.get("graphics"), get_args(Graphics))
    require_choice("--os", said.get("system"), get_args(System))


class DeviceOptions(TypedDict, total=False):
    """How a device is given to a guest; every option may be omitted."""

    managed: bool
    """Let libvirt bind and unbind it, instead of vfiomgr."""
    display: bool
    """Show the vGPU's display in <graphics>."""
    ramfb: bool
    """Show a framebuffer until the guest's driver is loaded."""
    rom: str | None
    """Its option ROM: a file, or `off` for none."""
    boot_order: int | None
    """Its boot order, from 1 on."""
    driver_model: str | None
    """The VFIO driver that libvirt binds it to (libvirt 10.0)."""
    iommufd: bool | None
    """Use /dev/iommu (libvirt 12.1); None to use it where the host has it."""
    unassigned: bool
    """Keep the device from the guest: libvirt only detaches it, for its IOMMU group."""
    teaming: str | None
    """The alias of a virtio interface that replaces it during a migration (libvirt 7.1)."""
    acpi_nodes: str | None
    """Memoryless guest NUMA cells for the device's memory, `1-8` (libvirt 11.8; GB200)."""


def attach_options(options: DeviceOptions) -> AttachOptions:
    """The options of the device.

    Raises:
        UsageError: a number is out of range.

    """
    require_whole("--boot-order", options.get("boot_order"), 1)
    return AttachOptions(
        is_managed=options.get("managed", False),
        display=options.get("display", False),
        ramfb=options.get("ramfb", False),
        rom=options.get("rom"),
        boot_order=options.get("boot_order"),
        driver_model=options.get("driver_model"),
        has_iommufd=options.get("iommufd") or False,
        is_unassigned=options.get("unassigned", False),
        acpi_nodes=options.get("acpi_nodes"),
        partner=options.get("teaming"),
    )
