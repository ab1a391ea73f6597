"""PCI functions: /sys/bus/pci/devices (Documentation/ABI/testing/sysfs-bus-pci)."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from vfiomgr.errors import HostError
from vfiomgr.host import bounded, stuck
from vfiomgr.host.vpd import read_serial
from vfiomgr.model import path
from vfiomgr.model.origin import DriverState
from vfiomgr.model.pci import UNKNOWN_CALL, Bar, DeviceIdentity, PciAddress, PciDevice, is_address

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.host.names import Names
    from vfiomgr.host.tree import HostTree
    from vfiomgr.model.path import HostPath

_CONFIG_BYTES = 16
"""As far as the header type; each dword more is another access to the device."""
_HEADER_TYPE_OFFSET = 0x0E
_HEADER_TYPE_MASK = 0x7F
_BARS = 6
_IO, _MEM, _PREFETCH, _MEM_64 = 0x100, 0x200, 0x2000, 0x100000
"""Flags of the third column of `resource` (include/linux/ioport.h)."""
_ASLEEP = "suspended"
"""Reading the configuration space of a function in this state would wake it (pci_read_config)."""
_MODALIAS = re.compile(
    r"pci:v0000([0-9A-F]{4})d0000([0-9A-F]{4})sv0000([0-9A-F]{4})sd0000([0-9A-F]{4})"
    r"bc([0-9A-F]{2})sc([0-9A-F]{2})i([0-9A-F]{2})"
)
"""All identifiers in one attribute (modalias_show in drivers/pci/pci-sysfs.c)."""
_RESOURCE = re.compile(r"(0x[0-9a-f]+) (0x[0-9a-f]+) (0x[0-9a-f]+)")
_INTEGER = re.compile(r"-?[0-9]+")
_NODE_DIRECTORIES = {
    "drm": (re.compile(r"(card|renderD)\d+"), "/dev/dri"),
    "accel": (re.compile(r"accel\d+"), "/dev/accel"),
}
_SOUND_NODE = re.compile(r"(controlC|pcmC|hwC|midiC)\w+")
_NVIDIA_MINOR = re.compile(r"^Device Minor:\s*(\d+)$", re.MULTILINE)
_NVIDIA_GPUS = path.HostPath("/proc/driver/nvidia/gpus")
_UNDER_LOCK = ("driver_override", "sriov_numvfs")
"""Attributes that are shown under the lock of the device; so is `uevent`, which nobody needs."""
_VIRTFN = re.compile(r"virtfn(\d+)")


class _Identifiers(NamedTuple):
    """What a function is, in hexadecimal digits without prefix."""

    vendor_id: str
    device_id: str
    subsystem_id: str
    class_code: str


def read_devices(
    tree: HostTree, names: Names, serials_of: frozenset[tuple[int, int, int]] = frozenset()
) -> tuple[PciDevice, ...]:
    """All functions, sorted by address; one that cannot be read hides no other.

    Serial numbers are read in the slots that are named alone: it takes its time.
    """
    found: list[PciDevice] = []
    addresses = list(filter(is_address, tree.children(path.PCI_DEVICES)))
    locked = _read_locked(tree, addresses)
    modules = DriverModules(tree)
    for name in addresses:
        try:
            device = read_device(tree, name, names, locked.get(name), modules)
        except HostError as error:
            warnings.warn(f"{name} is left out: {error}", stacklevel=2)
        else:
            found += [device] if device else []
    found = [
        replace(device, serial=read_serial(tree, device.address))
        if device.address.slot in serials_of
        else device
        for device in found
    ]
    return tuple(sorted(found, key=lambda device: device.address))


@dataclass(frozen=True, slots=True)
class Locked:
    """What a function shows under its lock; or what the kernel has not returned from meanwhile."""

    driver_override: str | None
    sriov_numvfs: str | None
    stuck: str | None = None


def _read_locked(tree: HostTree, addresses: Iterable[str]) -> dict[str, Locked]:
    """Ask for all that is under locks in a child, which alone hangs where a lock is kept.

    A probe, a remove, a reset and a change of sriov_numvfs hold the lock of the device
    (really_probe and __device_release_driver in drivers/base/dd.c), with and without a driver.
    """
    if not tree.can_hang:
        return {}
    marked = stuck.read_marks(tree)
    asked = {
        name: [path.PCI_DEVICES / name / attribute for attribute in _UNDER_LOCK]
        for name in addresses
        if name not in marked
    }
    answers = bounded.read_attributes(tree, asked)
    silent = Locked(None, None, UNKNOWN_CALL)
    found = {name: Locked(*values) if values else silent for name, values in answers.items()}
    return found | {name: Locked(None, None, what) for name, what in marked.items()}


class DriverModules:
    """The modules of drivers, each looked up once."""

    def __init__(self, tree: HostTree) -> None:
        self._tree = tree
        self._known: dict[str, str | None] = {}

    def of(self, driver: str | None) -> str | None:
        """The module that holds a driver; None for a built-in one."""
        if driver is None:
            return None
        if driver not in self._known:
            self._known[driver] = self._tree.link_name(path.PCI_DRIVERS / driver / "module")
        return self._known[driver]


def read_device(
    tree: HostTree,
    name: str,
    names: Names,
    locked: Locked | None = None,
    modules: DriverModules | None = None,
) -> PciDevice | None:
    """One function; None where it vanished meanwhile.

    `locked` is what was read of it under its lock; without, it is read here.
    """
    directory = path.PCI_DEVICES / name
    modalias = tree.read(directory / "modalias") or None
    identifiers = _identifiers(tree, directory, modalias)
    if identifiers is None:
        return None
    entries = frozenset(tree.children(directory))

    def read(attribute: str) -> str | None:
        """What a function has not is not opened in vain."""
        return (tree.read(directory / attribute) or None) if attribute in entries else None

    def link_name(link: str) -> str | None:
        return tree.link_name(directory / link) if link in entries else None

    if locked is None:
        locked = Locked(*map(read, _UNDER_LOCK))
    runtime_status = tree.read(directory / "power/runtime_status") or None
    is_asleep = locked.stuck is not None or runtime_status == _ASLEEP
    config = b"" if is_asleep else _config_header(tree, directory)
    name_of_device, class_name = names.of(
        directory, identifiers.vendor_id, identifiers.device_id, identifiers.class_code, modalias
    )
    driver = link_name("driver")
    vfio_device = _vfio_device(tree, directory, entries)
    return PciDevice(
        address=PciAddress.parse(name),
        name=name_of_device,
        vendor_id=identifiers.vendor_id,
        device_id=identifiers.device_id,
        subsystem_id=identifiers.subsystem_id,
        class_code=identifiers.class_code,
        class_name=class_name,
        revision=_hexadecimal(read("revision")) or "00",
        header_type=_header_type(config),
        bridge_path=_bridge_path(tree, directory),
        driver=driver,
        driver_override=_override(locked.driver_override),
        driver_module=(modules or DriverModules(tree)).of(driver),
        modalias=modalias,
        iommu_group=_number(link_name("iommu_group")),
        numa_node=_numa_node(read("numa_node")),
        physical_function=_address(link_name("physfn")),
        virtual_functions=_virtual_functions(tree, directory, entries),
        sriov_totalvfs=_number(read("sriov_totalvfs")),
        sriov_numvfs=_number(locked.sriov_numvfs),
        sriov_drivers_autoprobe=_flag(read("sriov_drivers_autoprobe")),
        is_boot_display=False,
        is_responsive=_is_alive(config),
        vfio_device=vfio_device,
        vfio_cdev=vfio_device is not None and tree.exists(path.VFIO_CDEVS / vfio_device),
        reset_method=tuple((read("reset_method") or "").split()),
        power_state=read("power_state"),
        power_control=tree.read(directory / "power/control") or None,
        runtime_status=runtime_status,
        d3cold_allowed=_flag(read("d3cold_allowed")),
        nodes=_nodes(tree, directory, entries, driver),
        bars=_bars(read("resource")),
        stuck=locked.stuck,
    )


def read_identity(
    tree: HostTree, address: PciAddress, *, with_serial: bool = False
) -> DeviceIdentity | None:
    """What is at an address now; None where there is nothing."""
    directory = path.pci_device(address)
    identifiers = _identifiers(tree, directory, tree.read(directory / "modalias"))
    if identifiers is None:
        return None
    return DeviceIdentity(
        address=address,
        **identifiers._asdict(),
        bridge_path=_bridge_path(tree, directory),
        serial=read_serial(tree, address) if with_serial else None,
    )


def read_driver_state(
    tree: HostTree, address: PciAddress, *, with_pins: bool = False
) -> DriverState:
    """Which driver has a function now, and its override; `with_pins` reset and D3cold too."""
    directory = path.pci_device(address)
    return DriverState(
        driver=tree.link_name(directory / "driver"),
        driver_override=_override(tree.read(directory / "driver_override")),
        power_control=tree.read(directory / "power/control") or None,
        reset_method=tree.read(directory / "reset_method") if with_pins else None,
        d3cold_allowed=_flag(tree.read(directory / "d3cold_allowed")) if with_pins else None,
    )


def read_virtual_functions(tree: HostTree, address: PciAddress) -> tuple[PciAddress, ...]:
    """The virtual functions of a physical one, by its links."""
    directory = path.pci_device(address)
    return _virtual_functions(tree, directory, frozenset(tree.children(directory)))


def answers(tree: HostTree, address: PciAddress) -> bool:
    """Whether the configuration space still reads as something else than all ones."""
    return _is_alive(_config_header(tree, path.pci_device(address)))


def _is_alive(config: bytes) -> bool:
    """A dead function reads as all ones; a virtual one does so in its vendor and device alone."""
    return not config or config.count(0xFF) < len(config)


def _hexadecimal(text: str | None) -> str | None:
    return None if not text else text.removeprefix("0x").lower()


def _flag(text: str | None) -> bool | None:
    return text == "1" if text else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and _INTEGER.fullmatch(text) else None


def _numa_node(text: str | None) -> int | None:
    """None for -1, which means that the firmware did not say."""
    node = _number(text)
    return None if node is None or node < 0 else node


def _override(text: str | None) -> str | None:
    """None where unset: the kernel prints `(null)`, or nothing."""
    return None if text in (None, "", "(null)") else text


def _identifiers(tree: HostTree, directory: HostPath, modalias: str | None) -> _Identifiers | None:
    """From `modalias`, or from the single attributes; None where the function is gone."""
    if match := _MODALIAS.fullmatch(modalias or ""):
        parts = [part.lower() for part in match.groups()]
        return _Identifiers(parts[0], parts[1], f"{parts[2]}:{parts[3]}", "".join(parts[4:]))
    vendor, device, code, subvendor, subdevice = (
        _hexadecimal(tree.read(directory / attribute))
        for attribute in ("vendor", "device", "class", "subsystem_vendor", "subsystem_device")
    )
    if not (vendor and device and code):
        return None
    return _Identifiers(vendor, device, f"{subvendor or '0000'}:{subdevice or '0000'}", code)


def _vfio_device(tree: HostTree, directory: HostPath, entries: frozenset[str]) -> str | None:
    if "vfio-dev" not in entries:
        return None
    return next(iter(tree.children(directory / "vfio-dev")), None)


def _config_header(tree: HostTree, directory: HostPath) -> bytes:
    return tree.read_bytes(directory / "config", _CONFIG_BYTES) or b""


def _header_type(config: bytes) -> int | None:
    if len(config) <= _HEADER_TYPE_OFFSET or not _is_alive(config):
        return None
    return config[_HEADER_TYPE_OFFSET] & _HEADER_TYPE_MASK


def _bridge_path(tree: HostTree, directory: HostPath) -> str:
    target = tree.link(directory) or ""
    return target.partition("devices/")[2].rpartition("/")[0]


def _virtual_functions(
    tree: HostTree, directory: HostPath, entries: frozenset[str]
) -> tuple[PciAddress, ...]:
    """In the order of their index, which need not be that of their addresses."""
    links = sorted((int(match[1]), name) for name in entries if (match := _VIRTFN.fullmatch(name)))
    targets = (_address(tree.link_name(directory / name)) for _, name in links)
    return tuple(target for target in targets if target)


def _address(name: str | None) -> PciAddress | None:
    return PciAddress.parse(name) if name is not None and is_address(name) else None


def _nodes(
    tree: HostTree, directory: HostPath, entries: frozenset[str], driver: str | None
) -> tuple[str, ...]:
    """The nodes below /dev that the host driver made for a function."""
    found = [
        f"{place}/{name}"
        for kind, (pattern, place) in _NODE_DIRECTORIES.items()
        if kind in entries
        for name in tree.children(directory / kind)
        if pattern.fullmatch(name)
    ]
    found += [
        f"/dev/snd/{name}"
        for device in (tree.children(directory / "sound") if "sound" in entries else ())
        for name in tree.children(directory / "sound" / device)
        if _SOUND_NODE.fullmatch(name)
    ]
    return (*found, *(_nvidia_nodes(tree, directory.name) if driver == "nvidia" else ()))


def _nvidia_nodes(tree: HostTree, address: str) -> tuple[str, ...]:
    """`/dev/nvidiaN`, whose number the driver tells; its control node where it does not."""
    information = tree.read(_NVIDIA_GPUS / address / "information") or ""
    minor = _NVIDIA_MINOR.search(information)
    return (f"/dev/nvidia{minor[1]}",) if minor else ("/dev/nvidiactl",)


def _bars(resource: str | None) -> tuple[Bar, ...]:
    """The six BARs of `resource`: start, end and flags, one line each."""
    bars: list[Bar] = []
    for index, line in enumerate((resource or "").splitlines()[:_BARS]):
        match = _RESOURCE.fullmatch(line)
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
