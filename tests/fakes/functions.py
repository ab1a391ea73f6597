"""PCI functions and IOMMU groups as sysfs lays them out."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tests.fakes.disks import number_of
from tests.fakes.sysfs import READ_ONLY, WRITE_ONLY, Sysfs
from vfiomgr.paths import IOMMU_GROUPS, PCI_DEVICES, HostPath
from vfiomgr.pci.capabilities import CONFIG_SIZE
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Iterable

_ORDINARY_BAR = 0x40200
MSIX = 0x60
"""Where the capability MSI-X is in the configuration space."""
_CLASS_DIRECTORIES = {"drm": "/dev/dri", "block": "/dev", "sound": "/dev/snd"}
"""Where devtmpfs makes the nodes of a class; network interfaces have none."""


def moved(address: PciAddress, **numbers: int) -> PciAddress:
    """The same address but for some of its numbers."""
    names = ("domain", "bus", "device", "function")
    return PciAddress(**{name: numbers.get(name, getattr(address, name)) for name in names})


class Link(NamedTuple):
    """A link of PCI Express: GT/s and lanes, now and at most; with a width of 0 it is down."""

    speed: str
    width: int
    max_speed: str
    max_width: int

    def attributes(self) -> dict[str, str]:
        """As drivers/pci/pci-sysfs.c shows it."""
        return {
            "current_link_speed": f"{self.speed} GT/s PCIe" if self.width else "Unknown",
            "current_link_width": str(self.width),
            "max_link_speed": f"{self.max_speed} GT/s PCIe",
            "max_link_width": str(self.max_width),
        }


@dataclass(frozen=True)
class PciFunction:
    """What a PCI function is; `gives` are (class, path below it) while a driver has it."""

    address: str
    vendor: str
    device: str
    class_code: str
    group: int | None
    bridge: str | None = None
    subsystem: str = "1af4:1100"
    header_type: int = 0
    boot_vga: bool | None = None
    numa_node: int = -1
    reset_methods: str = "flr bus"
    gives: tuple[tuple[str, str], ...] = ()
    total_vfs: int = 0
    vf_device: str = ""
    vf_offset: int = 0x80
    vf_stride: int = 4
    physical_function: str | None = None
    link: Link | None = None
    vf_vectors: tuple[int, int] | None = None
    """MSI-X vectors that its driver can distribute: in total, and by default for each."""
    vectors: int = 0
    """The Table Size of its own MSI-X; 0 for none."""
    late_group: int | None = None
    """Its group from the first driver on, as on ARM before Linux 6.15."""

    @property
    def is_bridge(self) -> bool:
        """Whether it has a secondary bus."""
        return self.header_type & 0x7F == 1

    @property
    def modalias(self) -> str:
        """As in Documentation/ABI/testing/sysfs-bus-pci."""
        vendor, device, subsystem = self.vendor, self.device, self.subsystem
        subvendor, subdevice = subsystem.upper().split(":")
        base, sub, interface = (self.class_code.upper()[i : i + 2] for i in (0, 2, 4))
        return (
            f"pci:v0000{vendor.upper()}d0000{device.upper()}sv0000{subvendor}sd0000{subdevice}"
            f"bc{base}sc{sub}i{interface}"
        )

    def virtual(self, address: str, group: int | None) -> PciFunction:
        """A virtual function of this one."""
        return PciFunction(
            address=address,
            vendor=self.vendor,
            device=self.vf_device,
            class_code=self.class_code,
            group=group,
            bridge=self.bridge,
            subsystem=self.subsystem,
            numa_node=self.numa_node,
            reset_methods="flr",
            physical_function=self.address,
            vectors=self.vf_vectors[1] if self.vf_vectors else 0,
        )


class Groups:
    """/sys/kernel/iommu_groups."""

    def __init__(self, sysfs: Sysfs) -> None:
        self._sysfs = sysfs

    def fresh(self) -> int:
        """The lowest number that is free (iommu_group_alloc)."""
        return self._sysfs.free_number(IOMMU_GROUPS)

    def join(self, number: int, device: HostPath, kind: str = "DMA-FQ", name: str = "") -> None:
        """Make a device a member; the group appears with its first one."""
        group = IOMMU_GROUPS / str(number)
        if not self._sysfs.exists(group):
            self._sysfs.put(group / "type", kind)
            self._sysfs.put(group / "reserved_regions", "0x00000000fee00000 0x00000000feefffff msi")
            if name:
                self._sysfs.put(group / "name", name, READ_ONLY)
        self._sysfs.link(group / "devices" / device.name, device)
        self._sysfs.link(device / "iommu_group", group)

    def leave(self, device: HostPath) -> None:
        """Take a device out; the group goes with its last one."""
        number = self.of(device)
        if number is None:
            return
        group = IOMMU_GROUPS / str(number)
        self._sysfs.drop(group / "devices" / device.name)
        self._sysfs.drop(device / "iommu_group")
        if not self._sysfs.names(group / "devices"):
            self._sysfs.drop(group)

    def of(self, device: HostPath) -> int | None:
        """The number of a device's group."""
        name = self._sysfs.target_name(device / "iommu_group")
        return None if name is None else int(name)

    def members(self, number: int) -> list[HostPath]:
        """The directories of all members."""
        devices = IOMMU_GROUPS / str(number) / "devices"
        found = (self._sysfs.target(devices / name) for name in self._sysfs.names(devices))
        return [path for path in found if path is not None]


class _Known(dict[str, PciFunction]):
    """By address; virtual functions that a child process made are known by their links."""

    def __init__(self, sysfs: Sysfs) -> None:
        super().__init__()
        self._sysfs = sysfs

    def __missing__(self, address: str) -> PciFunction:
        physical = self._sysfs.target_name(PCI_DEVICES / address / "physfn")
        if physical is None:
            raise KeyError(address)
        self[address] = self[physical].virtual(address, None)
        return self[address]


class Functions:
    """The functions that are there, and what is known of those that were."""

    def __init__(self, sysfs: Sysfs, groups: Groups) -> None:
        self._sysfs = sysfs
        self._groups = groups
        self.known: dict[str, PciFunction] = _Known(sysfs)
        self.has_override = True
        """Kernels before 3.16 have no driver_override."""

    def present(self) -> list[str]:
        """The addresses of all functions that are there."""
        return self._sysfs.names(PCI_DEVICES)

    def directory(self, address: str) -> HostPath | None:
        """The directory below /sys/devices; None where there is no such function."""
        if not address or "/" in address or address.startswith("."):
            return None
        return self._sysfs.target(PCI_DEVICES / address)

    def add(self, function: PciFunction) -> HostPath:
        """Lay a function out, without a driver."""
        self.known[function.address] = function
        directory = self._place(function)
        for name, text in _attributes(function).items():
            self._sysfs.put(directory / name, text, READ_ONLY)
        override = {"driver_override": "(null)"} if self.has_override else {}
        for name, text in (override | _settings(function)).items():
            self._sysfs.put(directory / name, text)
        resets = ("reset",) if function.reset_methods else ()
        bus_resets = ("reset_subordinate",) if function.is_bridge else ()
        vectors = ("sriov_vf_msix_count",) if function.physical_function else ()
        for name in ("remove", "rescan", *resets, *bus_resets, *vectors):
            self._sysfs.put(directory / name, "", WRITE_ONLY)
        self._sysfs.put_bytes(directory / "config", config_space(function))
        self._sysfs.link(directory / "subsystem", "/sys/bus/pci")
        self._sysfs.link(PCI_DEVICES / function.address, directory)
        self._sysfs.put(f"/sys/class/pci_bus/{function.address[:7]}/rescan", "", WRITE_ONLY)
        if function.group is not None:
            self._groups.join(function.group, directory)
        self.show_driver(function.address, None)
        return directory

    def _place(self, function: PciFunction) -> HostPath:
        address = PciAddress.parse(function.address)
        root = f"pci{address.domain:04x}:{address.bus:02x}"
        if function.bridge is None:
            return HostPath("/sys/devices") / root / function.address
        above = self.directory(function.bridge)
        if above is None:
            message = f"{function.address}: add its bridge {function.bridge} first"
            raise ValueError(message)
        if PciAddress.parse(function.bridge).domain != address.domain:
            return above / root / function.address
        return above / function.address

    def configure_dma(self, address: str) -> None:
        """pci_dma_configure: a first probe may add a function to its group, which it then keeps."""
        directory, late = self.directory(address), self.known[address].late_group
        if directory is not None and late is not None and self._groups.of(directory) is None:
            self._groups.join(late, directory)

    def drop(self, address: str) -> None:
        """Take a function away; its driver has let go of it before."""
        directory = self.directory(address)
        if directory is None:
            return
        self._groups.leave(directory)
        self._sysfs.drop(PCI_DEVICES / address)
        self._sysfs.drop(directory)

    def below(self, address: str) -> list[str]:
        """The functions behind a bridge, those farthest from it first."""
        directory = self.directory(address)
        inside = [
            (place, name)
            for name in self.present()
            if directory and (place := self.directory(name) or "").startswith(f"{directory}/")
        ]
        return [name for _, name in sorted(inside, key=lambda pair: -len(pair[0]))]

    def show_driver(self, address: str, driver: str | None) -> None:
        """Keep `uevent` in step with the driver."""
        function = self.known[address]
        directory = self.directory(address)
        lines = [f"DRIVER={driver}"] if driver else []
        lines += [
            f"PCI_CLASS={function.class_code.lstrip('0').upper()}",
            f"PCI_ID={function.vendor}:{function.device}".upper(),
            f"PCI_SUBSYS_ID={function.subsystem}".upper(),
            f"PCI_SLOT_NAME={address}",
            f"MODALIAS={function.modalias}",
        ]
        if directory:
            self._sysfs.put(directory / "uevent", "\n".join(lines))

    def open_classes(self, address: str) -> None:
        """What a driver makes of a function: displays, disks, interfaces, and their nodes."""
        directory = self.directory(address)
        if directory is None:
            return
        for kind, below in self.known[address].gives:
            self._sysfs.make(directory / below)
            name = below.rsplit("/", 1)[-1]
            self._sysfs.link(f"/sys/class/{kind}/{name}", directory / below)
            if kind == "drm":
                self._sysfs.put(directory / below / "uevent", "")
            if kind == "block":
                self._sysfs.put(directory / below / "dev", number_of(name), READ_ONLY)
                self._sysfs.link(f"/sys/dev/block/{number_of(name)}", directory / below)
            if kind in _CLASS_DIRECTORIES:
                self._sysfs.put(f"{_CLASS_DIRECTORIES[kind]}/{name}", "")

    def close_classes(self, address: str) -> None:
        """Take all that away again."""
        directory = self.directory(address)
        for kind, below in self.known[address].gives:
            name = below.rsplit("/", 1)[-1]
            self._sysfs.drop(f"/sys/class/{kind}/{name}")
            if kind == "block":
                self._sysfs.drop(f"/sys/dev/block/{number_of(name)}")
            if kind in _CLASS_DIRECTORIES:
                self._sysfs.drop(f"{_CLASS_DIRECTORIES[kind]}/{name}")
            if directory:
                self._sysfs.drop(directory / below.split("/", 1)[0])


def _attributes(function: PciFunction) -> dict[str, str]:
    subvendor, subdevice = function.subsystem.split(":")
    texts = {
        "vendor": f"0x{function.vendor}",
        "device": f"0x{function.device}",
        "class": f"0x{function.class_code}",
        "subsystem_vendor": f"0x{subvendor}",
        "subsystem_device": f"0x{subdevice}",
        "revision": "0xa1",
        "irq": "0",
        "modalias": function.modalias,
        "resource": "\n".join(_resource_lines(function)),
        "power_state": "D0",
        "power/runtime_status": "active",
    }
    if function.boot_vga is not None:
        texts["boot_vga"] = str(int(function.boot_vga))
    if function.total_vfs:
        texts["sriov_totalvfs"] = str(function.total_vfs)
        texts["ari_enabled"] = "1"
        texts["sriov_offset"] = str(function.vf_offset)
        texts["sriov_stride"] = str(function.vf_stride)
        texts["sriov_vf_device"] = function.vf_device
        texts["sriov_vf_total_msix"] = "0"
    if function.link is not None:
        texts |= function.link.attributes()
    return texts


def _settings(function: PciFunction) -> dict[str, str]:
    texts = {
        "numa_node": str(function.numa_node),
        "d3cold_allowed": "1",
        "power/control": "on",
    }
    if function.reset_methods:
        texts["reset_method"] = function.reset_methods
    if function.total_vfs:
        texts |= {"sriov_numvfs": "0", "sriov_drivers_autoprobe": "1"}
    return texts


def _resource_lines(function: PciFunction) -> Iterable[str]:
    """One memory BAR of 16 MB at a place of the function's own, then 12 empty lines."""
    address = PciAddress.parse(function.address)
    routing_id = address.bus << 8 | address.device << 3 | address.function
    start = 0x80000000 + (address.domain << 40) + (routing_id << 24)
    yield f"0x{start:016x} 0x{start + 0xFFFFFF:016x} 0x{_ORDINARY_BAR:016x}"
    yield from [" ".join(["0x" + "0" * 16] * 3)] * 12


def config_space(function: PciFunction) -> bytes:
    """256 bytes: the header, and capabilities that say of resets what `reset_methods` lists.

    Power management at 40h, without a reset unless `pm` is listed; PCI Express at 50h; MSI-X, of
    functions with vectors, at 60h.
    """
    methods = function.reset_methods.split()
    header = bytearray(config_header(function))
    header[0x06], header[0x34] = 0x10, 0x40
    power = struct.pack("<BBHH2x", 0x01, 0x50, 0x0003, 0x0000 if "pm" in methods else 0x0008)
    following = MSIX if function.vectors else 0x00
    express = struct.pack("<BBHI", 0x10, following, 0x0002, (1 << 28) * ("flr" in methods))
    msix = struct.pack("<BBH", 0x11, 0x00, function.vectors - 1) if function.vectors else b""
    parts = (bytes(header), power.ljust(16, b"\0"), express.ljust(16, b"\0"), msix)
    return b"".join(parts).ljust(CONFIG_SIZE, b"\0")


def config_header(function: PciFunction) -> bytes:
    """The first 64 bytes; a virtual function reads ffff:ffff there (SR-IOV 1.1, 3.4.1.1)."""
    vendor, device = int(function.vendor, 16), int(function.device, 16)
    if function.physical_function is not None:
        vendor = device = 0xFFFF
    code = bytes.fromhex(function.class_code)[::-1]
    header = struct.pack("<HHHHB3sBBBB", vendor, device, 6, 16, 0xA1, code, 0, 0, 0, 0)
    header = header[:0x0E] + bytes([function.header_type]) + header[0x0F:]
    subvendor, subdevice = (int(part, 16) for part in function.subsystem.split(":"))
    return header.ljust(0x2C, b"\0") + struct.pack("<HH", subvendor, subdevice) + bytes(16)
