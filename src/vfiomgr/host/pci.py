"""PCI functions: /sys/bus/pci/devices (Documentation/ABI/testing/sysfs-bus-pci)."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vfiomgr.errors import HostError
from vfiomgr.host import bounded, function, stuck
from vfiomgr.host.function import Function
from vfiomgr.host.vpd import read_serial
from vfiomgr.model import path
from vfiomgr.model.origin import DriverState
from vfiomgr.model.pci import UNKNOWN_CALL, DeviceIdentity, PciAddress, PciDevice, is_address

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vfiomgr.host.names import Names
    from vfiomgr.host.tree import HostTree

_ASLEEP = "suspended"
"""Reading the configuration space of a function in this state would wake it (pci_read_config)."""
_UNDER_LOCK = ("driver_override", "sriov_numvfs")
"""Attributes that are shown under the lock of the device; so is `uevent`, which nobody needs."""


def list_addresses(tree: HostTree) -> tuple[PciAddress, ...]:
    """Of all functions, in no order."""
    names = filter(is_address, tree.children(path.PCI_DEVICES))
    return tuple(map(PciAddress.parse, names))


def read_devices(
    tree: HostTree,
    names: Names,
    serials_of: frozenset[tuple[int, int, int]] = frozenset(),
    only: frozenset[tuple[int, int, int]] | None = None,
) -> tuple[tuple[PciDevice, ...], tuple[str, ...]]:
    """All functions, or those in some slots `only`, sorted by address.

    The second are the addresses of those of which nothing shows what they are; one that vanished
    meanwhile is none of them. One that cannot be read hides no other. Serial numbers are read in
    the slots that are named alone: it takes its time.
    """
    found: list[PciDevice] = []
    unidentified: list[str] = []
    addresses = list(filter(is_address, tree.children(path.PCI_DEVICES)))
    if only is not None:
        addresses = [name for name in addresses if PciAddress.parse(name).slot in only]
    locked = _read_locked(tree, addresses)
    modules = DriverModules(tree)
    for name in addresses:
        try:
            device = read_device(tree, name, names, locked.get(name), modules)
        except HostError as error:
            warnings.warn(f"{name} is left out: {error}", stacklevel=2)
        else:
            found += [device] if device else []
            unidentified += [name] if device is None and _is_there(tree, name) else []
    found = [
        replace(device, serial=read_serial(tree, device.address))
        if device.address.slot in serials_of
        else device
        for device in found
    ]
    devices = tuple(sorted(found, key=lambda device: device.address))
    return devices, tuple(sorted(unidentified, key=PciAddress.parse))


def _is_there(tree: HostTree, name: str) -> bool:
    return tree.exists(path.PCI_DEVICES / name)


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
    known = function.identifiers_of(tree, directory, modalias)
    if known is None:
        return None
    found = Function(tree, directory)
    locked = locked or Locked(*map(found.read, _UNDER_LOCK))
    service, power = function.service_of(found), function.power_of(found)
    is_asleep = locked.stuck is not None or power["runtime_status"] == _ASLEEP
    own_name, class_name = names.of(
        directory, known.vendor_id, known.device_id, known.class_code, modalias
    )
    return PciDevice(
        address=PciAddress.parse(name),
        name=own_name,
        vendor_id=known.vendor_id,
        device_id=known.device_id,
        subsystem_id=known.subsystem_id,
        class_code=known.class_code,
        class_name=class_name,
        driver_override=function.override(locked.driver_override),
        driver_module=(modules or DriverModules(tree)).of(service["driver"]),
        modalias=modalias,
        is_boot_display=False,
        stuck=locked.stuck,
        **service,
        **power,
        **function.place_of(found),
        **function.sriov_of(found, locked.sriov_numvfs),
        **function.registers_of(found, is_asleep=is_asleep),
    )


def read_identity(
    tree: HostTree, address: PciAddress, *, with_serial: bool = False
) -> DeviceIdentity | None:
    """What is at an address now; None where there is nothing."""
    directory = path.pci_device(address)
    known = function.identifiers_of(tree, directory, tree.read(directory / "modalias"))
    if known is None:
        return None
    return DeviceIdentity(
        address=address,
        **known._asdict(),
        bridge_path=function.bridge_path(tree, directory),
        serial=read_serial(tree, address) if with_serial else None,
    )


def read_driver_state(
    tree: HostTree, address: PciAddress, *, with_pins: bool = False
) -> DriverState:
    """Which driver has a function now, and its override; `with_pins` reset and D3cold too."""
    directory = path.pci_device(address)
    allowed = tree.read(directory / "d3cold_allowed") if with_pins else None
    return DriverState(
        driver=tree.link_name(directory / "driver"),
        driver_override=function.override(tree.read(directory / "driver_override")),
        power_control=tree.read(directory / "power/control") or None,
        reset_method=tree.read(directory / "reset_method") if with_pins else None,
        d3cold_allowed=function.flag(allowed),
    )


def read_virtual_functions(tree: HostTree, address: PciAddress) -> tuple[PciAddress, ...]:
    """The virtual functions of a physical one, by its links."""
    return function.virtual_functions_of(Function(tree, path.pci_device(address)))


def answers(tree: HostTree, address: PciAddress) -> bool:
    """Whether the configuration space still reads as something else than all ones."""
    return function.is_alive(function.config_header(tree, path.pci_device(address)))
