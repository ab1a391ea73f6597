"""The directory of one PCI function: identity, location, driver, nodes, power, registers."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from vfiomgr.expressions import expression
from vfiomgr.paths import PCI_DEVICES, HostPath
from vfiomgr.pci.accelerators import COMPUTE_PARTITION, partition_nodes
from vfiomgr.pci.model import Bar, DeviceSecurity, PciAddress, is_address, pci_device
from vfiomgr.units import MIB
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree


CONFIG_BYTES = 16
"""Up to the header type; each further dword is another access to the device."""
_REVISION_OFFSET, _HEADER_TYPE_OFFSET = 0x08, 0x0E
_HEADER_TYPE_MASK = 0x7F
_BARS = 6
_IO, _MEM, _PREFETCH, _MEM_64, _UNSET = 0x100, 0x200, 0x2000, 0x100000, 0x20000000
"""Flags of the third column of `resource` (include/linux/ioport.h)."""
_MODALIAS = expression(
    r"pci:v0000([0-9A-F]{4})d0000([0-9A-F]{4})sv0000([0-9A-F]{4})sd0000([0-9A-F]{4})"
    r"bc([0-9A-F]{2})sc([0-9A-F]{2})i([0-9A-F]{2})"
)
"""All identifiers in one attribute (modalias_show in drivers/pci/pci-sysfs.c)."""
_RESOURCE = expression(r"(0x[0-9a-f]{1,32}) (0x[0-9a-f]{1,32}) (0x[0-9a-f]{1,32})")
_NO_FLAGS = " 0x0000000000000000"
"""At the end of the line of a BAR that is not there, as most are."""
_HEXADECIMAL = expression(r"[0-9a-f]{1,16}")
_INTEGER = expression(r"-?[0-9]+")
_VIRTIO_DRIVER = "virtio-pci"
_VIRTIO = expression(r"virtio\d+")
_VIRTIO_DEVICES = HostPath("/sys/bus/virtio/devices")
_VIRTFN = expression(r"virtfn(\d+)")


class Function:
    """The directory of a function, listed once, so that absent attributes are not opened."""

    __slots__ = ("directory", "entries", "tree")

    def __init__(
        self, tree: HostTree, directory: HostPath, entries: frozenset[str] | None = None
    ) -> None:
        self.tree = tree
        self.directory = directory
        self.entries = frozenset(tree.entries(directory)) if entries is None else entries

    def read(self, attribute: str) -> str | None:
        """The text of an attribute; None if it is absent or empty."""
        if attribute not in self.entries:
            return None
        return self.tree.read_in(self.directory, attribute) or None

    def read_below(self, name: str, attribute: str) -> str | None:
        """The text of an attribute in a directory of the function."""
        return self.tree.read(self.directory / name / attribute) if name in self.entries else None

    def read_bytes(self, attribute: str, limit: int) -> bytes:
        """The first bytes of an attribute."""
        if attribute not in self.entries:
            return b""
        return self.tree.read_bytes_in(self.directory, attribute, limit) or b""

    def link_name(self, link: str) -> str | None:
        """The last component of a link's target."""
        return self.tree.link_name(self.directory / link) if link in self.entries else None

    def children(self, name: str) -> list[str]:
        """The names in a directory of the function."""
        return self.tree.children(self.directory / name) if name in self.entries else []

    def number(self, attribute: str) -> int | None:
        """An attribute that is a whole number."""
        return number_in(self.read(attribute))

    def flag(self, attribute: str) -> bool | None:
        """An attribute of 0 or 1."""
        return flag(self.read(attribute))


_FOR_GUESTS = frozenset(
    {
        *("modalias", "vendor", "device", "class", "subsystem_vendor", "subsystem_device"),
        *("driver", "iommu_group", "physfn", "vfio-dev", "mdev_supported_types", "nvidia"),
        *("drm", "accel", "infiniband_verbs", "infiniband_mad", "uio", "sound"),
    }
)
"""What tells whether a function is in use, and by whom."""
_IN_TABLES = _FOR_GUESTS.union(
    ("numa_node", "driver_override", "power", "config", "boot_vga", "boot_display"),
    ("mem_info_vram_total", "resource"),
)
"""What the table of `list` shows besides."""
_IN_PICTURES = _IN_TABLES.union(("sriov_totalvfs", "sriov_numvfs", COMPUTE_PARTITION)).difference(
    ("mem_info_vram_total",)
)
"""What the pictures of `topology` show; `resource` shows the firmware's display."""
_OF_VIRTUAL = _IN_PICTURES.difference(("resource",))
"""Firmware cannot use a virtual function as its display, which `resource` would show."""
_NOT_IN_LAYOUTS = frozenset({"revision", "resource", "power_state", "tsm"})
"""What neither the rules of layouts nor their plans ask of a virtual function."""
Purpose = Literal["table", "picture", "layout"]


def _needed(entries: frozenset[str], purpose: Purpose) -> frozenset[str]:
    """The entries of a function's directory that are read for a purpose."""
    is_virtual = "physfn" in entries
    if purpose == "layout":
        return entries.difference(_NOT_IN_LAYOUTS) if is_virtual else entries
    shown = _OF_VIRTUAL if is_virtual else _IN_TABLES if purpose == "table" else _IN_PICTURES
    numbered = (entry for entry in entries if entry.startswith(("virtfn", "i2c-")))
    return (entries & shown).union(numbered)


class Functions:
    """The directories of functions, listed once for everything that a scan reads.

    A `purpose` limits functions to what a table or a picture shows, or a layout needs: of
    thousands, everything takes up to three times as long. In a table, a virtual function is only
    counted. With `whole`, other virtual functions are only counted, too.
    """

    def __init__(
        self,
        tree: HostTree,
        *,
        purpose: Purpose | None = None,
        whole: Container[str] | None = None,
    ) -> None:
        self._tree = tree
        self._purpose = purpose
        self._whole = whole
        self._known: dict[str, Function] = {}
        self._nvidia: frozenset[str] | None = None
        self._physical: dict[str, PciAddress] = {}

    def of(self, name: str) -> Function:
        """The function at an address."""
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = Function(self._tree, PCI_DEVICES / name)
            if self.is_counted(name):
                known.entries &= _FOR_GUESTS
            elif self._purpose is not None:
                known.entries = _needed(known.entries, self._purpose)
        return known

    def adopt(self, name: str, entries: frozenset[str]) -> None:
        """Know what another process has listed."""
        if name not in self._known:
            self._known[name] = Function(self._tree, PCI_DEVICES / name, entries)

    def nodes(self, name: str, driver: str | None) -> tuple[str, ...]:
        """The nodes of a function bound to `driver`."""
        function = self.of(name)
        nvidia = self._nvidia_nodes(name) if driver == "nvidia" else ()
        parts = parts_of(function, driver)
        if not nvidia and all(part.entries.isdisjoint(_OWNERS) for part in parts):
            return ()
        readers = (_by_class, _of_sound, _of_i2c)
        nodes = (*(node for part in parts for read in readers for node in read(part)), *nvidia)
        if driver != "amdgpu" or COMPUTE_PARTITION not in function.entries:
            return nodes
        return tuple(dict.fromkeys((*nodes, *partition_nodes(self._tree, name))))

    def _nvidia_nodes(self, name: str) -> tuple[str, ...]:
        """`/dev/nvidiaN`, with the number from the driver; if unknown, the control node."""
        if self._nvidia is None:
            self._nvidia = frozenset(self._tree.children(_NVIDIA_GPUS))
        known = name in self._nvidia
        information = self._tree.read(_NVIDIA_GPUS / name / "information") if known else None
        minor = _NVIDIA_MINOR.search(information or "")
        return (f"/dev/nvidia{minor[1]}",) if minor else ("/dev/nvidiactl",)

    def is_counted(self, name: str) -> bool:
        """Whether only that a function is there, and for whom, is asked."""
        is_asked = self._purpose != "table" and (self._whole is None or name in self._whole)
        return not is_asked and "physfn" in self.of(name).entries

    def virtual(self, name: str) -> tuple[PciAddress, ...]:
        """The virtual functions of a function, by its links."""
        found = virtual_functions_of(self.of(name))
        if found:
            physical = PciAddress.parse(name)
            self._physical.update((str(address), physical) for address in found)
        return found

    def physical(self, name: str) -> PciAddress | None:
        """The physical function of a virtual one; its link is only read if nothing links here."""
        return self._physical.get(name) or address_in(self.of(name).link_name("physfn"))


def touched_by(tree: HostTree, names: Iterable[str]) -> frozenset[str]:
    """The functions that a change of these can touch, directly or through another one.

    They share a slot or an IOMMU group, or are virtual functions of one function, or that one.
    """
    by_slot: dict[str, list[str]] = {}
    for name in filter(is_address, tree.children(PCI_DEVICES)):
        by_slot.setdefault(name.rpartition(".")[0], []).append(name)
    touched: set[str] = set()
    ahead = set(names)
    while ahead:
        name = ahead.pop()
        touched.add(name)
        function = Function(tree, PCI_DEVICES / name)
        beside = {
            *by_slot.get(name.rpartition(".")[0], ()),
            *filter(is_address, tree.children(function.directory / "iommu_group/devices")),
            *map(str, virtual_functions_of(function)),
            function.link_name("physfn") or name,
        }
        ahead |= beside.difference(touched)
    return frozenset(touched)


def parts_of(function: Function, driver: str | None) -> tuple[Function, ...]:
    """The directories with the classes of a function: its own, and that of its virtio device.

    Older kernels have the card of virtio-gpu below the latter, newer ones only that of virtio-snd
    (virtio_gpu_probe in drivers/gpu/drm/virtio/virtgpu_drv.c, sound/virtio/virtio_card.c).
    """
    if driver != _VIRTIO_DRIVER:
        return (function,)
    names = filter(_VIRTIO.fullmatch, function.tree.children(function.directory))
    return (function, *(Function(function.tree, function.directory / name) for name in names))


def address_of(tree: HostTree, name: str | None) -> PciAddress | None:
    """The function that a device is, or that a virtio device belongs to."""
    if name is not None and _VIRTIO.fullmatch(name):
        above = (tree.link(_VIRTIO_DEVICES / name) or "").split("/")
        name = next(filter(is_address, reversed(above)), None)
    return address_in(name)


class Identifiers(Value):
    """The IDs of a function, hexadecimal digits without prefix."""

    vendor_id: str
    device_id: str
    subsystem_id: str
    class_code: str


def identifiers_of(tree: HostTree, directory: HostPath, modalias: str | None) -> Identifiers | None:
    """The IDs from `modalias`, or from single attributes; None if the function is gone."""
    if match := _MODALIAS.fullmatch(modalias or ""):
        parts = [part.lower() for part in match.groups()]
        return Identifiers(parts[0], parts[1], f"{parts[2]}:{parts[3]}", "".join(parts[4:]))
    vendor, device, code, subvendor, subdevice = (
        hexadecimal(tree.read(directory / attribute))
        for attribute in ("vendor", "device", "class", "subsystem_vendor", "subsystem_device")
    )
    if not (vendor and device and code):
        return None
    return Identifiers(vendor, device, f"{subvendor or '0000'}:{subdevice or '0000'}", code)


def bridge_path(tree: HostTree, directory: HostPath) -> str:
    """The bridges above a function, from the root complex down."""
    target = tree.link(directory) or ""
    return target.partition("devices/")[2].rpartition("/")[0]


def virtual_functions_of(function: Function) -> tuple[PciAddress, ...]:
    """Sorted by index, which may differ from the order of their addresses."""
    if "physfn" in function.entries:
        return ()
    names = [name for name in function.entries if name.startswith("virtfn")]
    if not names:
        return ()
    links = sorted((int(match[1]), match[0]) for match in map(_VIRTFN.fullmatch, names) if match)
    targets = (address_in(function.link_name(name)) for _, name in links)
    return tuple(target for target in targets if target)


def config_header(function: Function) -> bytes:
    """The configuration space up to the header type; reading it wakes a sleeping function."""
    return function.read_bytes("config", CONFIG_BYTES)


def is_alive(config: bytes) -> bool:
    """A dead function reads as all ones; a virtual function does so only in vendor and device."""
    return not config or config.count(0xFF) < len(config)


def revision_in(config: bytes) -> str | None:
    """The revision, which the attribute repeats; None if unknown."""
    if len(config) <= _REVISION_OFFSET or not is_alive(config):
        return None
    return f"{config[_REVISION_OFFSET]:02x}"


def header_type(config: bytes) -> int | None:
    """The type of the header, without the bit for several functions; None if unknown."""
    if len(config) <= _HEADER_TYPE_OFFSET or not is_alive(config):
        return None
    return config[_HEADER_TYPE_OFFSET] & _HEADER_TYPE_MASK


def bars_of(function: Function, lines: list[str], *, is_asleep: bool) -> Iterator[Bar]:
    """The six BARs of `resource`: start, end and flags, one line each."""
    for index, line in enumerate(lines[:_BARS]):
        match = None if line.endswith(_NO_FLAGS) else _RESOURCE.fullmatch(line)
        if match is None:
            continue
        start, end, flags = (int(field, 16) for field in match.groups())
        if flags & (_IO | _MEM) and end > start:
            yield Bar(
                index=index,
                start=start,
                size=end - start + 1,
                is_memory=bool(flags & _MEM),
                is_64bit=bool(flags & _MEM_64),
                is_prefetchable=bool(flags & _PREFETCH),
                sizes=_sizes(function, index, is_asleep=is_asleep),
                is_unassigned=bool(flags & _UNSET),
            )


def present_bars(tree: HostTree, address: PciAddress) -> tuple[Bar, ...]:
    """The BARs that a function has now, without the sizes that they may have."""
    function = Function(tree, pci_device(address))
    lines = (function.read("resource") or "").splitlines()
    return tuple(bars_of(function, lines, is_asleep=True))


def unassigned_vf_bars(lines: list[str]) -> Iterator[int]:
    """The BARs of virtual functions (lines 7 to 12 of `resource`) without an address.

    sriov_enable in drivers/pci/iov.c then fails: "not enough MMIO resources for SR-IOV" (ENOMEM).
    """
    for index, line in enumerate(lines[_BARS + 1 : 2 * _BARS + 1]):
        match = None if line.endswith(_NO_FLAGS) else _RESOURCE.fullmatch(line)
        if match is not None:
            start, end, flags = (int(field, 16) for field in match.groups())
            if flags & _MEM and end > start and (not start or flags & _UNSET):
                yield index


def _sizes(function: Function, index: int, *, is_asleep: bool) -> tuple[int, ...] | None:
    """The sizes that a BAR can have: bit n is 2^n MiB; reading wakes the function.

    See sysfs-bus-pci in Documentation/ABI/testing, as of Linux 6.1.
    """
    name = f"resource{index}_resize"
    if name not in function.entries:
        return ()
    text = None if is_asleep else hexadecimal(function.read(name))
    if text is None or not _HEXADECIMAL.fullmatch(text):
        return None
    bits = int(text, 16)
    return tuple(MIB << n for n in range(bits.bit_length()) if bits >> n & 1)


def override(text: str | None) -> str | None:
    """None if unset: the kernel then prints `(null)` or nothing."""
    return None if text in (None, "", "(null)") else text


def flag(text: str | None) -> bool | None:
    """An attribute of 0 or 1."""
    return text == "1" if text else None


def hexadecimal(text: str | None) -> str | None:
    """Digits of a hexadecimal attribute, in lower case and without prefix."""
    return None if not text else text.removeprefix("0x").lower()


def number_in(text: str | None) -> int | None:
    """A whole number in a text."""
    return int(text) if text is not None and _INTEGER.fullmatch(text) else None


@lru_cache(maxsize=1 << 13)
def address_in(name: str | None) -> PciAddress | None:
    """The address that is a name in sysfs."""
    return PciAddress.parse(name) if name is not None and is_address(name) else None


def security_of(function: Function) -> DeviceSecurity | None:
    """The directory `tsm` of a function; its attributes are empty while there is no session."""
    if "tsm" not in function.entries:
        return None
    return DeviceSecurity(
        connect=function.read_below("tsm", "connect") or None,
        bound=function.read_below("tsm", "bound") or None,
        manager=function.read_below("tsm", "dsm") or None,
    )


_DIRECTORIES = {
    "drm": (expression(r"(card|renderD)\d+"), "/dev/dri"),
    "accel": (expression(r"accel\d+"), "/dev/accel"),
    "infiniband_verbs": (expression(r"uverbs\d+"), "/dev/infiniband"),
    "infiniband_mad": (expression(r"(umad|issm)\d+"), "/dev/infiniband"),
    "uio": (expression(r"uio\d+"), "/dev"),
}
"""Subdirectories of a function by class, and where udev creates their nodes."""
_OWNERS = frozenset({*_DIRECTORIES, "sound"})
_I2C = expression(r"i2c-\d+")
_SOUND_NODE = expression(r"(controlC|pcmC|hwC|midiC)\w+")
_NVIDIA_MINOR = expression(r"^Device Minor:\s*(\d+)$", re.MULTILINE)
_NVIDIA_GPUS = HostPath("/proc/driver/nvidia/gpus")


def _by_class(function: Function) -> Iterator[str]:
    for kind, (pattern, place) in _DIRECTORIES.items():
        for name in function.children(kind):
            if pattern.fullmatch(name):
                yield f"{place}/{name}"


def _of_sound(function: Function) -> Iterator[str]:
    for card in function.children("sound"):
        for name in function.tree.children(function.directory / "sound" / card):
            if _SOUND_NODE.fullmatch(name):
                yield f"/dev/snd/{name}"


def _of_i2c(function: Function) -> Iterator[str]:
    """The nodes of a display's I2C adapters, also those of its connectors (DP AUX).

    Programs that set the brightness of monitors have them open. The removal of an adapter waits
    for that (i2c_del_adapter in drivers/i2c/i2c-core-base.c), and so does an unbind of its driver.
    """
    tree, directory = function.tree, function.directory
    places = [directory / name for name in function.entries if _I2C.fullmatch(name)]
    for card in function.children("drm"):
        connectors = tree.children(directory / "drm" / card) if card.startswith("card") else ()
        for connector in connectors:
            if connector.startswith(f"{card}-"):
                place = directory / "drm" / card / connector
                places += (place / name for name in tree.children(place) if _I2C.fullmatch(name))
    for place in sorted(places, key=str):
        if tree.exists(place / "i2c-dev"):
            yield f"/dev/{place.name}"
