"""Capabilities of a function: links, reset methods, vital product data, address translation.

Vital product data: PCI Local Bus 3.0, appendix I. Extended capabilities: PCIe 6.0, 7.6.3. ATS lets
a device cache translations of the IOMMU; PASID lets it use several address spaces, which shared
virtual addressing and accelerated virtual IOMMUs need. The kernel enables ATS if the IOMMU supports
it, and PASID if a driver uses it (drivers/pci/ats.c; registers: include/uapi/linux/pci_regs.h).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Literal, get_args

from vfiomgr.expressions import expression
from vfiomgr.paths import PCI_SLOTS, HostPath
from vfiomgr.pci.model import PciAddress, PciDevice, pci_device
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree

CONFIG_END = 0x1000
"""Bytes of configuration space; only root can read more than 64."""
_FIRST = 0x100
_SHORTEST = 8


def extended_capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    """Identifier and offset of each extended capability; a circular list ends."""
    at, seen = _FIRST, set[int]()
    while at >= _FIRST and at + _SHORTEST <= len(config) and at not in seen:
        seen.add(at)
        header = int.from_bytes(config[at : at + 4], "little")
        yield header & 0xFFFF, at
        at = header >> 20 & ~3


def word(config: bytes, at: int) -> int:
    """A register of 16 bits."""
    return int.from_bytes(config[at : at + 2], "little")


_SPEED = expression(r"(\d{1,3}(?:\.\d{1,2})?) GT/s(?: PCIe)?")
_WIDEST = 32
"""Lanes; `max_link_width` of a function without a link reads 255 (PCIE_LNK_WIDTH_UNKNOWN)."""
SLEEPING = "suspended"


class PciLink(Value):
    """The link of a function: of a port that leads down, the one below it; else the one above it.

    Speeds are in GT/s, widths in lanes; None where there is no link, or the kernel does not know.
    """

    address: PciAddress
    speed: float | None
    width: int | None
    max_speed: float | None
    max_width: int | None


def read_links(tree: HostTree, devices: Iterable[PciDevice]) -> tuple[PciLink, ...]:
    """The links of physical functions that are awake.

    Reading the attributes wakes a function that is suspended (current_link_speed_show in
    drivers/pci/pci-sysfs.c), and the registers of a virtual function are zero (SR-IOV 1.1, 3.5).
    """
    found = (
        _read_link(tree, device.address)
        for device in devices
        if device.physical_function is None
        and device.stuck is None
        and device.is_responsive
        and device.runtime_status != SLEEPING
    )
    return tuple(link for link in found if link is not None)


def _read_link(tree: HostTree, address: PciAddress) -> PciLink | None:
    directory = pci_device(address)
    width = _width(tree.read(directory / "max_link_width"))
    if width is None:
        return None
    return PciLink(
        address=address,
        speed=_speed(tree, directory / "current_link_speed"),
        width=_width(tree.read(directory / "current_link_width")),
        max_speed=_speed(tree, directory / "max_link_speed"),
        max_width=width,
    )


def _speed(tree: HostTree, path: HostPath) -> float | None:
    """Of `8.0 GT/s PCIe`, and of `8 GT/s` before Linux 5.7; `Unknown` is None."""
    match = _SPEED.fullmatch(tree.read(path) or "")
    return float(match[1]) if match else None


def _width(text: str | None) -> int | None:
    lanes = int(text) if text is not None and text.isdecimal() else 0
    return lanes if 0 < lanes <= _WIDEST else None


ResetMethod = Literal["device_specific", "acpi", "flr", "af_flr", "pm", "bus", "cxl_bus"]
"""The names in `reset_method` (pci_reset_fn_methods in drivers/pci/pci.c)."""

RESET_METHODS: tuple[ResetMethod, ...] = get_args(ResetMethod)
"""In the order in which the kernel tries them."""

COMMON_RESETS: tuple[ResetMethod, ...] = ("flr", "pm", "bus")
"""Methods that people expect for any function; the others need firmware or special hardware."""

Offer = Literal["yes", "no", "absent"]
"""The answer of a capability about a reset; `absent` if the function lacks the capability."""

CONFIG_SIZE = 256
"""Bytes of configuration space with the capabilities; only root can read more than 64."""

_COMMAND = slice(0x04, 0x06)
_STATUS, _HAS_CAPABILITIES = 0x06, 0x10
_BARS = slice(0x10, 0x28)
_FIRST_CAPABILITY = 0x34
_HEADER_END = 0x40
_MOST_CAPABILITIES = 48
_FLRESET, _TP_AND_FLR, _NO_SOFT_RESET = 0x10, 0x03, 0x08
"""Bits of the highest byte of DevCap, of the AF capabilities, of the lowest byte of PMCSR."""
_POWER_MANAGEMENT, _PCI_EXPRESS, _MSIX, _ADVANCED_FEATURES = 0x01, 0x10, 0x11, 0x13
_TABLE_SIZE = 0x07FF
"""Bits of the Message Control of MSI-X: the number of vectors, minus one."""


class ResetCapabilities(Value):
    """Reset capabilities in a function's configuration space (include/uapi/linux/pci_regs.h)."""

    address: PciAddress
    flr: Offer
    """FLReset, bit 28 of the Device Capabilities of PCI Express."""
    af_flr: Offer
    """Both TP and FLR of the Advanced Features capability of conventional PCI."""
    pm: Offer
    """`no` with No_Soft_Reset: the function keeps its state from D3hot to D0."""
    kept: str
    """What a reset must not change, as returned by `kept_by_reset`."""


def reset_capabilities(address: PciAddress, config: bytes) -> ResetCapabilities | None:
    """Read the capabilities; None if they are not readable or the function is dead."""
    if len(config) < CONFIG_SIZE or config.count(0xFF) == len(config):
        return None
    places = dict(_capabilities(config))
    express, features, power = (
        places.get(number) for number in (_PCI_EXPRESS, _ADVANCED_FEATURES, _POWER_MANAGEMENT)
    )
    return ResetCapabilities(
        address,
        flr=_offer(express, lambda at: bool(config[at + 7] & _FLRESET)),
        af_flr=_offer(features, lambda at: config[at + 3] & _TP_AND_FLR == _TP_AND_FLR),
        pm=_offer(power, lambda at: not config[at + 4] & _NO_SOFT_RESET),
        kept=kept_by_reset(config),
    )


def _offer(at: int | None, test: Callable[[int], bool]) -> Offer:
    if at is None:
        return "absent"
    return "yes" if test(at) else "no"


def _capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    """Identifier and offset of each capability; a circular list ends."""
    if not config[_STATUS] & _HAS_CAPABILITIES:
        return
    at = config[_FIRST_CAPABILITY] & ~3
    for _ in range(_MOST_CAPABILITIES):
        if at < _HEADER_END or at + 8 > len(config):
            return
        yield config[at], at
        at = config[at + 1] & ~3


def kept_by_reset(config: bytes) -> str:
    """What the kernel restores after a reset, hexadecimal: the command register and the BARs."""
    return (config[_COMMAND] + config[_BARS]).hex()


def read_config(tree: HostTree, address: PciAddress) -> bytes:
    """The first 256 bytes, or the 64 that any user can read; empty if there are none.

    Reading wakes a suspended function (pci_read_config).
    """
    return tree.read_bytes(pci_device(address) / "config", CONFIG_SIZE) or b""


def read_reset_capabilities(
    tree: HostTree, devices: Iterable[PciDevice]
) -> tuple[ResetCapabilities, ...]:
    """The reset capabilities of functions that are awake; sleeping ones are not read."""
    found = (
        reset_capabilities(device.address, read_config(tree, device.address))
        for device in devices
        if device.runtime_status != "suspended"
    )
    return tuple(capabilities for capabilities in found if capabilities is not None)


class MsixVectors(Value):
    """The MSI-X vectors of a virtual function whose number of them can be set."""

    address: PciAddress
    count: int
    """The Table Size."""


def read_msix(tree: HostTree, devices: Iterable[PciDevice]) -> tuple[MsixVectors, ...]:
    """The vectors of virtual functions, where the driver of the physical function can set them.

    The attribute `sriov_vf_msix_count` is write-only; the number is the Table Size in the
    configuration space (Documentation/ABI/testing/sysfs-bus-pci). It requires root.
    """
    able = (device for device in devices if device.sriov_vf_total_msix and not device.stuck)
    addresses = (address for device in able for address in device.virtual_functions)
    found = ((address, read_vectors(tree, address)) for address in addresses)
    return tuple(MsixVectors(address, count) for address, count in found if count is not None)


def read_vectors(tree: HostTree, address: PciAddress) -> int | None:
    """The number of MSI-X vectors of a function; None if it has none, or it is not readable."""
    return vectors_in(read_config(tree, address))


def vectors_in(config: bytes) -> int | None:
    """The number of MSI-X vectors in a configuration space; None if it has none."""
    if len(config) < CONFIG_SIZE or config.count(0xFF) == len(config):
        return None
    at = dict(_capabilities(config)).get(_MSIX)
    if at is None:
        return None
    return (int.from_bytes(config[at + 2 : at + 4], "little") & _TABLE_SIZE) + 1


def read_bus_resets(tree: HostTree, devices: Iterable[PciDevice]) -> tuple[PciAddress, ...]:
    """The bridges that can reset their secondary bus (`reset_subordinate`, since Linux 6.13)."""
    return tuple(
        device.address
        for device in devices
        if device.is_bridge and tree.exists(pci_device(device.address) / "reset_subordinate")
    )


def slot_with_power(tree: HostTree, address: PciAddress) -> str | None:
    """The hot-plug slot with power control; its `address` has no function number."""
    wanted = str(address).rpartition(".")[0]
    for name in tree.children(PCI_SLOTS):
        slot = PCI_SLOTS / name
        if tree.read(slot / "address") == wanted and tree.exists(slot / "power"):
            return slot / "power"
    return None


_LIMIT = 1024
"""Bytes to read: reading is slow (four at a time), and the serial number is near the start."""
_LARGE = 0x80
_READ_ONLY = 0x90
_FIELD_HEADER = 3
_SERIAL = b"SN"


def read_serial(tree: HostTree, address: PciAddress) -> str | None:
    """The serial number; None if there is none, the function sleeps, or reading is denied."""
    directory = pci_device(address)
    if tree.read(directory / "power/runtime_status") == SLEEPING:
        return None
    return serial_of(tree.read_bytes(directory / "vpd", _LIMIT) or b"")


def serial_of(data: bytes) -> str | None:
    """The field SN of the read-only section."""
    for tag, section in _resources(data):
        if tag != _READ_ONLY:
            continue
        for keyword, value in _fields(section):
            if keyword == _SERIAL:
                return value.decode("ascii", errors="replace").strip(" \0") or None
    return None


def _resources(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and content of each large resource, up to the first small one, which is the end."""
    position = 0
    while position + _FIELD_HEADER <= len(data) and data[position] & _LARGE:
        length = int.from_bytes(data[position + 1 : position + _FIELD_HEADER], "little")
        start = position + _FIELD_HEADER
        yield data[position], data[start : start + length]
        position = start + length


def _fields(section: bytes) -> Iterator[tuple[bytes, bytes]]:
    position = 0
    while position + _FIELD_HEADER <= len(section):
        length = section[position + 2]
        start = position + _FIELD_HEADER
        yield section[position : position + 2], section[start : start + length]
        position = start + length


Service = Literal["on", "off", "absent"]
"""The state of a service; `absent` if the function lacks its capability."""
_ATS, _PASID = 0x0F, 0x1B
_PASID_CAPABILITY, _SERVICE_CONTROL = 4, 6
_ATS_ON, _PASID_ON = 1 << 15, 1 << 0
_PASID_WIDTH, _WIDTH_BITS = 8, 0x1F


class Translation(Value):
    """ATS and PASID of a function that has at least one of them."""

    address: PciAddress
    ats: Service
    """Whether the device may cache translations."""
    pasid: Service
    """Whether the device may use several address spaces."""
    pasid_bits: int = 0
    """The width of a PASID that the function supports; 0 without PASID."""


def read_translations(tree: HostTree, devices: Iterable[PciDevice]) -> tuple[Translation, ...]:
    """The services of functions that are awake; only root can read the registers."""
    found = (
        translation_in(
            device.address,
            tree.read_bytes(pci_device(device.address) / "config", CONFIG_END) or b"",
        )
        for device in devices
        if not device.is_bridge and device.runtime_status != SLEEPING and device.stuck is None
    )
    return tuple(each for each in found if each is not None)


def translation_in(address: PciAddress, config: bytes) -> Translation | None:
    """Read the services in a configuration space; None if it has neither."""
    places = dict(reversed(list(extended_capabilities(config))))
    ats, pasid = places.get(_ATS), places.get(_PASID)
    if ats is None and pasid is None:
        return None
    width = (
        0
        if pasid is None
        else word(config, pasid + _PASID_CAPABILITY) >> _PASID_WIDTH & _WIDTH_BITS
    )
    return Translation(
        address,
        _service_state(config, ats, _ATS_ON),
        _service_state(config, pasid, _PASID_ON),
        width,
    )


def _service_state(config: bytes, at: int | None, enabled: int) -> Service:
    if at is None:
        return "absent"
    return "on" if word(config, at + _SERVICE_CONTROL) & enabled else "off"
