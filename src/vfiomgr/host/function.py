"""One PCI function by topic: what it is, where it sits, who has it, how it is split and powered."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from vfiomgr.host.nodes import nodes_of
from vfiomgr.model import path
from vfiomgr.model.pci import Bar, PciAddress, is_address

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.path import HostPath

_CONFIG_BYTES = 16
"""As far as the header type; each dword more is another access to the device."""
_HEADER_TYPE_OFFSET = 0x0E
_HEADER_TYPE_MASK = 0x7F
_BARS = 6
_IO, _MEM, _PREFETCH, _MEM_64 = 0x100, 0x200, 0x2000, 0x100000
"""Flags of the third column of `resource` (include/linux/ioport.h)."""
_MODALIAS = re.compile(
    r"pci:v0000([0-9A-F]{4})d0000([0-9A-F]{4})sv0000([0-9A-F]{4})sd0000([0-9A-F]{4})"
    r"bc([0-9A-F]{2})sc([0-9A-F]{2})i([0-9A-F]{2})"
)
"""All identifiers in one attribute (modalias_show in drivers/pci/pci-sysfs.c)."""
_RESOURCE = re.compile(r"(0x[0-9a-f]{1,32}) (0x[0-9a-f]{1,32}) (0x[0-9a-f]{1,32})")
_NO_FLAGS = " 0x0000000000000000"
"""At the end of the line of a BAR that is not there, as most are."""
_INTEGER = re.compile(r"-?[0-9]+")
_VIRTFN = re.compile(r"virtfn(\d+)")


class Function:
    """The directory of a function, listed once: what it has not is not opened in vain."""

    __slots__ = ("directory", "entries", "tree")

    def __init__(self, tree: HostTree, directory: HostPath) -> None:
        self.tree = tree
        self.directory = directory
        self.entries = frozenset(tree.children(directory))

    def read(self, attribute: str) -> str | None:
        """The text of an attribute; None where it is absent or empty."""
        if attribute not in self.entries:
            return None
        return self.tree.read(self.directory / attribute) or None

    def link_name(self, link: str) -> str | None:
        """The last component of what a link leads to."""
        return self.tree.link_name(self.directory / link) if link in self.entries else None

    def children(self, name: str) -> list[str]:
        """What a directory of the function holds."""
        return self.tree.children(self.directory / name) if name in self.entries else []


class Identifiers(NamedTuple):
    """What a function is, in hexadecimal digits without prefix."""

    vendor_id: str
    device_id: str
    subsystem_id: str
    class_code: str


def identifiers_of(tree: HostTree, directory: HostPath, modalias: str | None) -> Identifiers | None:
    """From `modalias`, or from the single attributes; None where the function is gone."""
    if match := _MODALIAS.fullmatch(modalias or ""):
        parts = [part.lower() for part in match.groups()]
        return Identifiers(parts[0], parts[1], f"{parts[2]}:{parts[3]}", "".join(parts[4:]))
    vendor, device, code, subvendor, subdevice = (
        _hexadecimal(tree.read(directory / attribute))
        for attribute in ("vendor", "device", "class", "subsystem_vendor", "subsystem_device")
    )
    if not (vendor and device and code):
        return None
    return Identifiers(vendor, device, f"{subvendor or '0000'}:{subdevice or '0000'}", code)


def bridge_path(tree: HostTree, directory: HostPath) -> str:
    """The bridges above a function, from its root complex."""
    target = tree.link(directory) or ""
    return target.partition("devices/")[2].rpartition("/")[0]


class Place(TypedDict):
    """Where a function sits."""

    bridge_path: str
    iommu_group: int | None
    numa_node: int | None


def place_of(function: Function) -> Place:
    """Read where a function sits; a node of -1 means that the firmware did not say."""
    node = _number(function.read("numa_node"))
    return Place(
        bridge_path=bridge_path(function.tree, function.directory),
        iommu_group=_number(function.link_name("iommu_group")),
        numa_node=None if node is None or node < 0 else node,
    )


class Service(TypedDict):
    """Who has a function, and what it offers to programs and guests."""

    driver: str | None
    vfio_device: str | None
    vfio_cdev: bool
    nodes: tuple[str, ...]


def service_of(function: Function) -> Service:
    """Read which driver has a function, and the nodes that came with it."""
    driver = function.link_name("driver")
    vfio_device = next(iter(function.children("vfio-dev")), None)
    return Service(
        driver=driver,
        vfio_device=vfio_device,
        vfio_cdev=vfio_device is not None and function.tree.exists(path.VFIO_CDEVS / vfio_device),
        nodes=nodes_of(function, driver),
    )


class Sriov(TypedDict):
    """How a function is split, or from which one it was split off."""

    physical_function: PciAddress | None
    virtual_functions: tuple[PciAddress, ...]
    sriov_totalvfs: int | None
    sriov_numvfs: int | None
    sriov_drivers_autoprobe: bool | None


def sriov_of(function: Function, sriov_numvfs: str | None) -> Sriov:
    """Read how a function is split; sriov_numvfs is shown under the lock of the device."""
    return Sriov(
        physical_function=_address(function.link_name("physfn")),
        virtual_functions=virtual_functions_of(function),
        sriov_totalvfs=_number(function.read("sriov_totalvfs")),
        sriov_numvfs=_number(sriov_numvfs),
        sriov_drivers_autoprobe=flag(function.read("sriov_drivers_autoprobe")),
    )


def virtual_functions_of(function: Function) -> tuple[PciAddress, ...]:
    """In the order of their index, which need not be that of their addresses."""
    names = (name for name in function.entries if name.startswith("virtfn"))
    links = sorted((int(match[1]), match[0]) for match in map(_VIRTFN.fullmatch, names) if match)
    targets = (_address(function.link_name(name)) for _, name in links)
    return tuple(target for target in targets if target)


class Power(TypedDict):
    """How a function can be reset, and whether it sleeps."""

    reset_method: tuple[str, ...]
    power_state: str | None
    power_control: str | None
    runtime_status: str | None
    d3cold_allowed: bool | None


def power_of(function: Function) -> Power:
    """Read how a function is reset and powered."""
    tree, directory = function.tree, function.directory
    return Power(
        reset_method=tuple((function.read("reset_method") or "").split()),
        power_state=function.read("power_state"),
        power_control=tree.read(directory / "power/control") or None,
        runtime_status=tree.read(directory / "power/runtime_status") or None,
        d3cold_allowed=flag(function.read("d3cold_allowed")),
    )


class Registers(TypedDict):
    """What a function says on the bus, and the memory that it has there."""

    revision: str
    header_type: int | None
    is_responsive: bool
    bars: tuple[Bar, ...]


def registers_of(function: Function, *, is_asleep: bool) -> Registers:
    """Read the head of the configuration space, unless that would wake or hang, and the BARs."""
    config = b"" if is_asleep else config_header(function.tree, function.directory)
    return Registers(
        revision=_hexadecimal(function.read("revision")) or "00",
        header_type=_header_type(config),
        is_responsive=is_alive(config),
        bars=_bars(function.read("resource")),
    )


def config_header(tree: HostTree, directory: HostPath) -> bytes:
    """The configuration space as far as the header type; reading wakes a sleeping function."""
    return tree.read_bytes(directory / "config", _CONFIG_BYTES) or b""


def is_alive(config: bytes) -> bool:
    """A dead function reads as all ones; a virtual one does so in its vendor and device alone."""
    return not config or config.count(0xFF) < len(config)


def _header_type(config: bytes) -> int | None:
    if len(config) <= _HEADER_TYPE_OFFSET or not is_alive(config):
        return None
    return config[_HEADER_TYPE_OFFSET] & _HEADER_TYPE_MASK


def _bars(resource: str | None) -> tuple[Bar, ...]:
    """The six BARs of `resource`: start, end and flags, one line each."""
    bars: list[Bar] = []
    for index, line in enumerate((resource or "").splitlines()[:_BARS]):
        match = None if line.endswith(_NO_FLAGS) else _RESOURCE.fullmatch(line)
        if match is None:
            continue
        start, end, flags = (int(field, 16) for field in match.groups())
        if flags & (_IO | _MEM) and end > start:
            bars.append(
                Bar(
                    index=index,
                    start=start,
                    size=end - start + 1,
                    is_memory=bool(flags & _MEM),
                    is_64bit=bool(flags & _MEM_64),
                    is_prefetchable=bool(flags & _PREFETCH),
                )
            )
    return tuple(bars)


def override(text: str | None) -> str | None:
    """None where unset: the kernel prints `(null)`, or nothing."""
    return None if text in (None, "", "(null)") else text


def flag(text: str | None) -> bool | None:
    """An attribute of 0 or 1."""
    return text == "1" if text else None


def _hexadecimal(text: str | None) -> str | None:
    return None if not text else text.removeprefix("0x").lower()


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and _INTEGER.fullmatch(text) else None


def _address(name: str | None) -> PciAddress | None:
    return PciAddress.parse(name) if name is not None and is_address(name) else None
