"""Facts of PCI functions: all of a host, one by its address, and which shows the console.

The console's display is recognised by any of these signs:
boot_vga: the firmware's primary VGA device. boot_display: the screen of the boot sequence, in newer
kernels (Documentation/ABI/testing/sysfs-bus-pci). /proc/iomem: a firmware framebuffer that is still
in a BAR. The frame buffer of the text console. A DRM master with a screen that is switched on.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from sys import intern
from typing import TYPE_CHECKING

from msgspec.structs import asdict, replace

from vfiomgr import paths
from vfiomgr.errors import HostError
from vfiomgr.expressions import expression
from vfiomgr.host import bounded
from vfiomgr.host.bounded import AttributeReader, in_parts
from vfiomgr.paths import HostPath
from vfiomgr.pci.accelerators import COMPUTE_PARTITION
from vfiomgr.pci.capabilities import read_serial
from vfiomgr.pci.drivers import DriverState
from vfiomgr.pci.function import (
    CONFIG_BYTES,
    Function,
    Functions,
    address_of,
    bars_of,
    bridge_path,
    config_header,
    flag,
    header_type,
    hexadecimal,
    identifiers_of,
    is_alive,
    number_in,
    override,
    parts_of,
    revision_in,
    security_of,
    unassigned_vf_bars,
    virtual_functions_of,
)
from vfiomgr.pci.model import (
    IN_ITS_MEMORY,
    IS_MASTER,
    UNKNOWN_CALL,
    DeviceIdentity,
    PciAddress,
    PciDevice,
    is_address,
    pci_device,
)
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.host.tree import HostTree
    from vfiomgr.pci.names import Names


_ASLEEP = "suspended"
_READABLE = frozenset({"D0", "D1", "D2", "D3hot"})
"""Power states in which reading the configuration space does not wake the function itself."""
_UNDER_LOCK = ("driver_override", "sriov_numvfs", "sriov_vf_total_msix")
"""Attributes that are read under the lock of the device; `uevent` is too, but is not used."""


def list_addresses(tree: HostTree) -> tuple[PciAddress, ...]:
    """The addresses of all functions, unsorted."""
    names = filter(is_address, tree.children(paths.PCI_DEVICES))
    return tuple(map(PciAddress.parse, names))


def read_devices(
    tree: HostTree,
    names: Names,
    functions: Functions,
    serials_of: frozenset[tuple[int, int, int]] = frozenset(),
    only: frozenset[tuple[int, int, int]] | None = None,
) -> tuple[tuple[PciDevice, ...], tuple[str, ...]]:
    """All functions, or those in the slots `only` with their physical functions, sorted by address.

    The second result contains the addresses of functions that cannot be identified. Functions that
    vanished in the meantime are omitted. One unreadable function does not hide the others. Serial
    numbers are only read in the named slots, since that takes time.
    """
    addresses = list(filter(is_address, tree.children(paths.PCI_DEVICES)))
    if only is not None:
        addresses = [name for name in addresses if PciAddress.parse(name).slot in only]
        physical = {str(owner) for name in addresses if (owner := functions.physical(name))}
        addresses += physical.difference(addresses)
    return read_named(tree, names, functions, addresses, serials_of)


def read_named(  # noqa: PLR0913 - each is a fact of its own
    tree: HostTree,
    names: Names,
    functions: Functions,
    addresses: Iterable[str],
    serials_of: frozenset[tuple[int, int, int]] = frozenset(),
    *,
    reader: AttributeReader | None = None,
) -> tuple[tuple[PciDevice, ...], tuple[str, ...]]:
    """The functions at these addresses, as `read_devices` returns them.

    The `reader` reads what is under locks; without it, a child is forked.
    """
    found: list[PciDevice] = []
    unidentified: list[str] = []
    addresses = tuple(addresses)
    not_counted = (name for name in addresses if not functions.is_counted(name))
    locked = _read_locked(tree, not_counted, reader)
    modules = DriverModules(tree)

    def read(part: Sequence[str]) -> list[_Answer]:
        return [_answer(functions, name, names, locked.get(name), modules) for name in part]

    for name, (device, error, entries) in zip(
        addresses, in_parts(tree, read, addresses), strict=True
    ):
        functions.adopt(name, entries)
        if error:
            warnings.warn(f"{name} is omitted: {error}", stacklevel=2)
        elif device is not None:
            found.append(device)
        elif tree.exists(paths.PCI_DEVICES / name):
            unidentified.append(name)
    found = [
        replace(device, serial=read_serial(tree, device.address))
        if device.address.slot in serials_of
        else device
        for device in found
    ]
    devices = tuple(sorted(found, key=lambda device: device.address))
    return devices, tuple(sorted(unidentified, key=PciAddress.parse))


_Answer = tuple["PciDevice | None", "str | None", frozenset[str]]
"""A function, why it is omitted, and what its directory contains."""


def _answer(
    functions: Functions, name: str, names: Names, locked: Locked | None, modules: DriverModules
) -> _Answer:
    device, error = None, None
    try:
        device = read_device(functions, name, names, locked, modules)
    except HostError as failure:
        error = str(failure)
    return device, error, frozenset(map(intern, functions.of(name).entries))


class Locked(Value):
    """Attributes of a function that are read under its lock, or what the kernel is stuck in."""

    driver_override: str | None
    sriov_numvfs: str | None
    sriov_vf_total_msix: str | None
    stuck: str | None = None


def _read_locked(
    tree: HostTree, addresses: Iterable[str], reader: AttributeReader | None
) -> dict[str, Locked]:
    """Read all attributes under locks in a child, since a held lock makes the reader hang.

    A probe, a remove, a reset and a change of sriov_numvfs hold the lock of the device
    (really_probe and __device_release_driver in drivers/base/dd.c), with and without a driver.
    """
    if not tree.can_hang:
        return {}
    marked = bounded.read_marks(tree)
    asked = {
        name: [paths.PCI_DEVICES / name / attribute for attribute in _UNDER_LOCK]
        for name in addresses
        if name not in marked
    }
    if reader is None:
        answers = bounded.read_attributes(tree, asked)
    else:
        answers = reader.read_attributes(asked)
    silent = Locked(None, None, None, stuck=UNKNOWN_CALL)
    found = {name: Locked(*values) if values else silent for name, values in answers.items()}
    return found | {name: Locked(None, None, None, stuck=what) for name, what in marked.items()}


class DriverModules:
    """The modules of drivers, each looked up once."""

    def __init__(self, tree: HostTree) -> None:
        self._tree = tree
        self._known: dict[str, str | None] = {}

    def of(self, driver: str | None) -> str | None:
        """The module of a driver; None if it is built in."""
        if driver is None:
            return None
        if driver not in self._known:
            self._known[driver] = self._tree.link_name(paths.PCI_DRIVERS / driver / "module")
        return self._known[driver]


def read_device(
    functions: Functions,
    name: str,
    names: Names,
    locked: Locked | None = None,
    modules: DriverModules | None = None,
) -> PciDevice | None:
    """One function; None if it vanished.

    `locked` contains the attributes read under its lock; without it, they are read here.
    """
    found = functions.of(name)
    tree, directory, modalias = found.tree, found.directory, found.read("modalias")
    known = identifiers_of(tree, directory, modalias)
    if known is None:
        return None
    locked = locked or Locked(*map(found.read, _UNDER_LOCK))
    driver = found.link_name("driver")
    cdev = next(iter(found.children("vfio-dev")), None)
    node, totalvfs = found.number("numa_node"), found.number("sriov_totalvfs")
    runtime_status = found.read_below("power", "runtime_status") or None
    above, is_asleep = bridge_path(tree, directory), runtime_status == _ASLEEP
    is_read = locked.stuck is None and (not is_asleep or _is_readable(tree, directory, above))
    config = config_header(found) if is_read else b""
    resources = (found.read("resource") or "").splitlines()
    own_name, class_name = names.of(
        directory, known.vendor_id, known.device_id, known.class_code, modalias
    )
    return PciDevice(
        address=PciAddress.parse(name),
        name=own_name,
        **asdict(known),
        class_name=class_name,
        revision=revision_in(config) or hexadecimal(found.read("revision")) or "00",
        modalias=modalias,
        bridge_path=above,
        iommu_group=number_in(found.link_name("iommu_group")),
        numa_node=None if node is None or node < 0 else node,  # -1: the firmware reports none
        driver=driver,
        driver_override=override(locked.driver_override),
        driver_module=(modules or DriverModules(tree)).of(driver),
        vfio_device=cdev,
        vfio_cdev=cdev is not None and tree.exists(paths.VFIO_CDEVS / cdev),
        nodes=functions.nodes(name, driver),
        stuck=locked.stuck,
        physical_function=functions.physical(name),
        virtual_functions=functions.virtual(name),
        sriov_totalvfs=totalvfs,
        sriov_numvfs=number_in(locked.sriov_numvfs),
        sriov_drivers_autoprobe=found.flag("sriov_drivers_autoprobe"),
        sriov_offset=found.number("sriov_offset"),
        sriov_stride=found.number("sriov_stride"),
        sriov_vf_total_msix=number_in(locked.sriov_vf_total_msix),
        reset_method=tuple((found.read("reset_method") or "").split()),
        power_state=found.read("power_state"),
        power_control=found.read_below("power", "control") or None,
        runtime_status=runtime_status,
        d3cold_allowed=found.flag("d3cold_allowed"),
        header_type=header_type(config),
        is_responsive=is_alive(config),
        bars=tuple(bars_of(found, resources, is_asleep=is_asleep or locked.stuck is not None)),
        ari_enabled=found.flag("ari_enabled") if totalvfs else None,
        unassigned_vf_bars=tuple(unassigned_vf_bars(resources)),
        vram=found.number("mem_info_vram_total"),
        tsm=security_of(found),
        compute_partition=found.read(COMPUTE_PARTITION),
        memory_partition=found.read("current_memory_partition"),
        is_boot_display=False,
    )


def read_identity(
    tree: HostTree, address: PciAddress, *, with_serial: bool = False
) -> DeviceIdentity | None:
    """The identity of the device at an address; None if there is none."""
    directory = pci_device(address)
    known = identifiers_of(tree, directory, tree.read(directory / "modalias"))
    if known is None:
        return None
    return DeviceIdentity(
        address=address,
        **asdict(known),
        bridge_path=bridge_path(tree, directory),
        serial=read_serial(tree, address) if with_serial else None,
    )


def read_driver_state(
    tree: HostTree, address: PciAddress, *, with_pins: bool = False
) -> DriverState:
    """The driver and override of a function; `with_pins` also reset methods and D3cold."""
    directory = pci_device(address)
    allowed = tree.read(directory / "d3cold_allowed") if with_pins else None
    return DriverState(
        driver=tree.link_name(directory / "driver"),
        driver_override=override(tree.read(directory / "driver_override")),
        power_control=tree.read(directory / "power/control") or None,
        reset_method=tree.read(directory / "reset_method") if with_pins else None,
        d3cold_allowed=flag(allowed),
    )


def read_virtual_functions(tree: HostTree, address: PciAddress) -> tuple[PciAddress, ...]:
    """The virtual functions of a physical function, by its links."""
    return virtual_functions_of(Function(tree, pci_device(address)))


def changed(tree: HostTree, devices: Iterable[PciDevice]) -> Iterator[PciAddress]:
    """The functions with another driver, that are not as awake as before, or do not answer now.

    Reading this wakes no function. One that answers has power, so its power state is not read.
    """
    bound: dict[str, frozenset[str]] = {}
    for device in devices:
        if device.driver is None:
            has_same = tree.link_name(pci_device(device.address) / "driver") is None
        else:
            if device.driver not in bound:
                listed = tree.entries(paths.PCI_DRIVERS / device.driver)
                bound[device.driver] = frozenset(listed)
            has_same = str(device.address) in bound[device.driver]
        if not has_same or not _is_as_before(tree, device):
            yield device.address


def _is_as_before(tree: HostTree, device: PciDevice) -> bool:
    directory = pci_device(device.address)
    runtime_status = tree.read_in(f"{directory}/power", "runtime_status") or None
    if runtime_status != device.runtime_status:
        return False
    if not device.is_responsive:
        return False  # it may have come back, or have another power state
    if device.stuck is not None or runtime_status == _ASLEEP:
        return True
    config = tree.read_bytes_in(directory, "config", CONFIG_BYTES) or b""
    return is_alive(config) and header_type(config) == device.header_type


def answers(tree: HostTree, address: PciAddress) -> bool:
    """Whether the configuration space reads as anything but all ones."""
    return is_alive(config_header(Function(tree, pci_device(address))))


def answers_asleep(tree: HostTree, device: PciDevice) -> bool | None:
    """Whether a suspended function answers; None if reading would wake it or its bridge."""
    is_readable = _is_readable(tree, pci_device(device.address), device.bridge_path)
    return answers(tree, device.address) if is_readable else None


def _is_readable(tree: HostTree, directory: HostPath, bridge_path: str) -> bool:
    """Whether the configuration space of a suspended function can be read without waking anything.

    Reading it resumes the bridge above a function, and the function itself only from D3cold
    (pci_config_pm_runtime_get in drivers/pci/pci.c).
    """
    bridge = bridge_path.rpartition("/")[2]
    if tree.read_in(directory, "power_state") not in _READABLE:
        return False
    status = f"{bridge}/power/runtime_status"
    return not is_address(bridge) or tree.read(paths.PCI_DEVICES / status) != _ASLEEP


_RANGE = expression(r"^( *)([0-9a-f]+)-([0-9a-f]+) : (.+)$", re.MULTILINE)
_OF_FIRMWARE = expression(
    r"BOOTFB|efifb|efidrm|vesafb|vesadrm|simplefb|simpledrm|ofdrm|simple-framebuffer\S*"
)
"""Framebuffers of the firmware: BOOTFB is the memory of the platform device that
drivers/firmware/sysfb_simplefb.c makes, the others are named after the driver that claimed it."""
_CONSOLES = HostPath("/sys/class/vtconsole")
_FRAMEBUFFERS = HostPath("/sys/class/graphics")
_FRAMEBUFFER = expression(r"fb(\d+)")
_DRM_DEBUG = HostPath("/sys/kernel/debug/dri")
_DRM_DEVICE = expression(r"\bdev=(\S+)")
_MASTER_COLUMN = 3


class FirmwareRange(Value):
    """The memory of a framebuffer of the firmware; its ends are 0 for users other than root."""

    first: int
    last: int
    name: str
    function: PciAddress | None
    """The function below which it is listed."""


class ConsoleState(Value):
    """What shows the console, apart from the attributes of functions."""

    ranges: tuple[FirmwareRange, ...]
    framebuffer: tuple[str, PciAddress] | None
    masters: dict[PciAddress, str]
    """DRM masters by function."""


def read_console(tree: HostTree) -> ConsoleState:
    """Read what shows the console."""
    return ConsoleState(firmware_ranges(tree) or (), _console_framebuffer(tree), _masters(tree))


def mark_displays(
    console: ConsoleState, functions: Functions, devices: Iterable[PciDevice]
) -> tuple[PciDevice, ...]:
    """The functions; those that show the console are marked with its signs."""
    return tuple(
        replace(device, is_boot_display=True, display_signs=signs)
        if (signs := tuple(_signs(functions, device, console)))
        else device
        for device in devices
    )


def _signs(functions: Functions, device: PciDevice, console: ConsoleState) -> Iterator[str]:
    found = functions.of(str(device.address))
    for name in ("boot_vga", "boot_display"):
        if found.read(name) == "1":
            yield f"{name} is 1"
    for one in console.ranges:
        is_inside = one.last and any(
            bar.start <= one.first and one.last < bar.start + bar.size for bar in device.bars
        )
        if is_inside or one.function == device.address:
            yield f"{one.name}{IN_ITS_MEMORY}"
    if console.framebuffer is not None and console.framebuffer[1] == device.address:
        yield f"the text console uses its {console.framebuffer[0]}"
    if device.address in console.masters and any(map(_has_screen, parts_of(found, device.driver))):
        yield f"{console.masters[device.address]}{IS_MASTER}"


def firmware_ranges(tree: HostTree) -> tuple[FirmwareRange, ...] | None:
    """The framebuffers in /proc/iomem, which shows nesting by indentation; None without it."""
    text = tree.read_text(HostPath("/proc/iomem"))
    if text is None:
        return None
    above: list[str] = []
    found: list[FirmwareRange] = []
    for indent, first, last, name in _RANGE.findall(text):
        above[len(indent) // 2 :] = [name]
        if _OF_FIRMWARE.fullmatch(name):
            functions = [PciAddress.parse(each) for each in above if is_address(each)]
            function = functions[-1] if functions else None
            found.append(FirmwareRange(int(first, 16), int(last, 16), name, function))
    return tuple(found)


def _console_framebuffer(tree: HostTree) -> tuple[str, PciAddress] | None:
    """The first frame buffer, if the text console is bound to one (fbcon takes the first)."""
    bound = any(
        "frame buffer" in (tree.read(_CONSOLES / name / "name") or "")
        and tree.read(_CONSOLES / name / "bind") == "1"
        for name in tree.children(_CONSOLES)
    )
    matches = map(_FRAMEBUFFER.fullmatch, tree.children(_FRAMEBUFFERS) if bound else ())
    numbers = sorted(int(match[1]) for match in matches if match)
    if not numbers:
        return None
    name = f"fb{numbers[0]}"
    address = address_of(tree, tree.link_name(_FRAMEBUFFERS / name / "device"))
    return (name, address) if address else None


def _masters(tree: HostTree) -> dict[PciAddress, str]:
    """DRM masters by function; only root can read them in debugfs (drm_clients_info)."""
    found: dict[PciAddress, str] = {}
    for minor in tree.children(_DRM_DEBUG):
        device = _DRM_DEVICE.search(tree.read(_DRM_DEBUG / minor / "name") or "")
        address = device and address_of(tree, device[1])
        if not address:
            continue
        for line in (tree.read_text(_DRM_DEBUG / minor / "clients") or "").splitlines()[1:]:
            fields = line.split()
            if len(fields) > _MASTER_COLUMN and fields[_MASTER_COLUMN] == "y":
                found[address] = f"{fields[0]} (PID {fields[1]})"
    return found


def _has_screen(function: Function) -> bool:
    tree, drm = function.tree, function.directory / "drm"
    return any(
        tree.read(drm / card / connector / "enabled") == "enabled"
        for card in function.children("drm")
        for connector in tree.children(drm / card)
        if connector.startswith(f"{card}-")
    )
