"""PCI drivers: matching, bind, unbind, probe (drivers/base/{bus,dd}.c, drivers/pci/pci-driver.c).

Which driver has a function is what its `driver` link says, so that a child process that writes
changes the same kernel as its parent sees; only dynamic ids live in memory.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.fakes.sysfs import WRITE_ONLY, Sysfs, first_line, reject
from vfiomgr.paths import PCI_DEVICES, PCI_DRIVERS, HostPath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.fakes.faults import Stuck
    from tests.fakes.functions import Functions, PciFunction
    from tests.fakes.vfio import Vfio

_PAGE = 4096
_UNSET = "(null)"
_HEX = re.compile(r"[0-9a-fA-F]+")
_MODULES = HostPath("/sys/module")

PciId = tuple[str, ...]
"""(vendor, device) or (vendor, device, start of the class); `*` fits any."""


class ProbeFailed(OSError):  # noqa: N818 - it names what happened
    """The driver's own probe refused: `bind` reports it, `drivers_probe` hides it (dd.c)."""


@dataclass
class Driver:
    """A driver that can be loaded; `module` None is built in.

    `probe_error` is what its probe answers from now on, and `holds` are the functions whose
    remove never returns, as nvidia's while the usage count is not zero.
    """

    name: str
    module: str | None
    ids: tuple[PciId, ...] = ()
    is_vfio: bool = False
    manages_dma: bool = False
    configures_sriov: bool = True
    probe_error: int | None = None
    holds: set[str] = field(default_factory=set)
    dynamic_ids: list[PciId] = field(default_factory=list)

    def knows(self, vendor: str, device: str, class_code: str = "") -> bool:
        """Whether an id, dynamic or static, fits."""
        return any(
            wanted[0] in ("*", vendor)
            and wanted[1] in ("*", device)
            and class_code.startswith("".join(wanted[2:]))
            for wanted in (*self.dynamic_ids, *self.ids)
        )


class Drivers:
    """/sys/bus/pci/drivers; drivers are tried in the order in which they were declared."""

    def __init__(self, sysfs: Sysfs, functions: Functions, vfio: Vfio, stuck: Stuck) -> None:
        self._sysfs = sysfs
        self._functions = functions
        self._vfio = vfio
        self._stuck = stuck
        self.known: dict[str, Driver] = {}
        self.others: dict[str, str] = {}
        """Modules without a PCI driver, and the module that each needs."""
        self.when_bound: list[Callable[[Driver, str], None]] = []
        self.when_leaving: list[Callable[[Driver, str], None]] = []
        self.obstacles: list[Callable[[Driver, str], str | None]] = []

    def loaded(self) -> list[Driver]:
        """The drivers that are registered with the bus."""
        return [d for d in self.known.values() if self._sysfs.exists(PCI_DRIVERS / d.name)]

    def driver_of(self, address: str) -> str | None:
        """The driver that the function's link names."""
        return self._sysfs.target_name(PCI_DEVICES / address / "driver")

    def register(self, driver: Driver) -> None:
        """Show a driver, and what its module brings, without looking for devices."""
        directory = PCI_DRIVERS / driver.name
        for name in ("bind", "unbind", "new_id", "remove_id", "uevent"):
            self._sysfs.put(directory / name, "", WRITE_ONLY)
        if driver.is_vfio:
            self._vfio.load()
        if driver.module is None:
            return
        module = _MODULES / driver.module.replace("-", "_")
        self._sysfs.put(module / "initstate", "live")
        self._sysfs.put(module / "refcnt", "0")
        self._sysfs.link(module / "drivers" / f"pci:{driver.name}", directory)
        self._sysfs.link(directory / "module", module)

    def load(self, module: str) -> bool:
        """Load a module and let its drivers look for devices; False where there is none such."""
        wanted = module.replace("-", "_")
        if wanted in self.others:
            self.load(self.others[wanted])
            if not self._sysfs.exists(_MODULES / wanted):
                needed = _MODULES / self.others[wanted] / "holders" / wanted
                self._sysfs.put(_MODULES / wanted / "initstate", "live")
                self._sysfs.link(needed, _MODULES / wanted)
            return True
        brought = [d for d in self.known.values() if (d.module or "").replace("-", "_") == wanted]
        for driver in brought:
            if driver not in self.loaded():
                self.register(driver)
                self._attach_all(driver)
        return bool(brought)

    def unload(self, module: str) -> None:
        """driver_detach and module_exit: its functions have no driver, and may hang in that."""
        for driver in [d for d in self.loaded() if d.module == module]:
            for address in self._functions.present():
                if self.driver_of(address) == driver.name:
                    self.detach(address)
            self._sysfs.drop(PCI_DRIVERS / driver.name)
        if module in self.others:
            self._sysfs.drop(_MODULES / self.others[module] / "holders" / module)
        self._sysfs.drop(_MODULES / module)

    def _attach_all(self, driver: Driver) -> None:
        """driver_attach: every function that fits and is free; errors are dropped."""
        for address in self._functions.present():
            if self.driver_of(address) is None and self.fits(driver, address):
                try:
                    self._attach(driver, address)
                except OSError:
                    continue

    def override(self, address: str) -> str | None:
        """The function's driver_override."""
        text = self._sysfs.get(PCI_DEVICES / address / "driver_override")
        return None if text in ("", _UNSET) else text

    def set_override(self, directory: HostPath, text: str) -> None:
        """driver_set_override: up to the first newline or NUL; a bare newline clears."""
        if len(text) >= _PAGE - 1:
            reject(errno.EINVAL)
        name = re.split(r"[\0\n]", text, maxsplit=1)[0]
        self._sysfs.put(directory / "driver_override", name or _UNSET)

    def fits(self, driver: Driver, address: str) -> bool:
        """pci_match_device: with an override, that driver and no other, whatever its ids."""
        override = self.override(address)
        if override is not None:
            return override == driver.name
        function = self._functions.known[address]
        return driver.knows(function.vendor, function.device, function.class_code)

    def bind(self, name: str, text: str) -> None:
        """bind_store: ENODEV where nothing fits, EBUSY where bound already, else probe's errno."""
        driver, address = self.known[name], first_line(text)
        if self._functions.directory(address) is None or not self.fits(driver, address):
            reject(errno.ENODEV)
        self._await_stuck(address)
        if self.driver_of(address) is not None:
            reject(errno.EBUSY)
        self._attach(driver, address)

    def unbind(self, name: str, text: str) -> None:
        """unbind_store: ENODEV unless this very driver has the function."""
        address = first_line(text)
        if self._functions.directory(address) is None or self.driver_of(address) != name:
            reject(errno.ENODEV)
        self.detach(address)

    def probe(self, text: str) -> None:
        """drivers_probe_store: success where nothing matched, and where every probe failed.

        Only an error that comes before a driver's probe is told, and always as EINVAL.
        """
        address = first_line(text)
        if self._functions.directory(address) is None:
            reject(errno.ENODEV)
        self._await_stuck(address)
        try:
            self.autoprobe(address)
        except OSError:
            reject(errno.EINVAL)

    def autoprobe(self, address: str) -> None:
        """device_attach: the first driver that fits and does not refuse."""
        for driver in self.loaded():
            if self.driver_of(address) is not None:
                return
            if self.fits(driver, address):
                try:
                    self._attach(driver, address)
                except ProbeFailed:
                    continue

    def new_id(self, name: str, text: str) -> None:
        """new_id_store: EINVAL without two numbers, EEXIST where known; takes all that fit."""
        driver, numbers = self.known[name], _hexadecimal_fields(text)
        if driver.knows(*numbers):
            reject(errno.EEXIST)
        driver.dynamic_ids.append(numbers)
        self._attach_all(driver)

    def remove_id(self, name: str, text: str) -> None:
        """remove_id_store: ENODEV for an id that was not added; bound functions stay bound."""
        driver, numbers = self.known[name], _hexadecimal_fields(text)
        if numbers not in driver.dynamic_ids:
            reject(errno.ENODEV)
        driver.dynamic_ids.remove(numbers)

    def attach(self, name: str, address: str) -> None:
        """Bind as the builder of a host wants it."""
        if not self.fits(self.known[name], address):
            message = f"{name} has no id that fits {address}, and no driver_override names it"
            raise ValueError(message)
        self._attach(self.known[name], address)

    def _attach(self, driver: Driver, address: str) -> None:
        """really_probe."""
        directory = self._functions.directory(address)
        function = self._functions.known[address]
        if directory is None:
            reject(errno.ENODEV)
        self._functions.configure_dma(address)
        # pci_dma_configure, before any probe: a guest owns the group's DMA.
        if not (driver.is_vfio or driver.manages_dma) and self._vfio.is_owned(directory):
            reject(errno.EBUSY)
        if number := self._refusal(driver, function, directory):
            raise ProbeFailed(number, "probe refused")
        self._sysfs.link(directory / "driver", PCI_DRIVERS / driver.name)
        self._sysfs.link(PCI_DRIVERS / driver.name / address, directory)
        self._functions.show_driver(address, driver.name)
        if driver.is_vfio:
            # vfio_pci_core_register_device: pm_runtime_allow, then idle.
            self._sysfs.put(directory / "power/control", "auto")
            self._vfio.register(directory)
            self._vfio.settle_power(directory)
        else:
            self._functions.open_classes(address)
        for listener in self.when_bound:
            listener(driver, address)

    def _refusal(self, driver: Driver, function: PciFunction, directory: HostPath) -> int | None:
        """The errno of the bus's and the driver's probe."""
        if not self._can_probe(function):
            return errno.ENODEV
        if driver.probe_error is not None:
            return driver.probe_error
        if not driver.is_vfio:
            return None
        if function.header_type & 0x7F:
            return errno.EINVAL
        if self._sysfs.get(directory / "sriov_numvfs") not in ("", "0"):
            return errno.EBUSY
        return None if self._sysfs.exists(directory / "iommu_group") else errno.EINVAL

    def _can_probe(self, function: PciFunction) -> bool:
        """pci_device_can_probe: without autoprobe a VF needs an override, even for `bind`."""
        if function.physical_function is None or self.override(function.address) is not None:
            return True
        physical = PCI_DEVICES / function.physical_function
        return self._sysfs.get(physical / "sriov_drivers_autoprobe") != "0"

    def detach(self, address: str, *, surprise: bool = False) -> None:
        """__device_release_driver: the links go first, then the driver's remove may hang."""
        name = self.driver_of(address)
        directory = self._functions.directory(address)
        if name is None or directory is None:
            self._await_stuck(address)
            return
        driver = self.known[name]
        self._sysfs.drop(PCI_DRIVERS / name / address)
        self._sysfs.drop(directory / "driver")
        why = None if surprise else self._obstacle(driver, address)
        if why:
            if driver.is_vfio:
                self._vfio.wait_for_guest(directory)
            self._stuck.forever(address, why, name)
        self._finish_detach(driver, address)

    def retry_stuck(self, address: str) -> None:
        """A removal that hung goes on once nothing is in its way."""
        driver = self.known[self._stuck.driver(address)]
        if self._obstacle(driver, address) is None:
            self._finish_detach(driver, address)

    def _obstacle(self, driver: Driver, address: str) -> str | None:
        """Why a driver's remove would wait for ever."""
        directory = self._functions.directory(address)
        if directory is not None and self._vfio.is_open(directory):
            return "a guest has the function open"
        if address in driver.holds:
            return f"{driver.name} waits for its last user"
        reasons = (ask(driver, address) for ask in self.obstacles)
        return next((reason for reason in reasons if reason), None)

    def _finish_detach(self, driver: Driver, address: str) -> None:
        """What a driver's remove does once nobody uses the function."""
        directory = self._functions.directory(address)
        if directory is None:
            return
        for listener in self.when_leaving:
            listener(driver, address)
        if driver.is_vfio:
            # vfio_pci_core_unregister_device: pm_runtime_forbid.
            self._vfio.unregister(directory)
            self._sysfs.put(directory / "power/control", "on")
            self._vfio.settle_power(directory)
        else:
            self._functions.close_classes(address)
        self._functions.show_driver(address, None)
        self._stuck.forget(address)

    def _await_stuck(self, address: str) -> None:
        """Whoever wants the lock of a device whose removal hangs, hangs too (device_lock)."""
        if address in self._stuck.names():
            self._stuck.forever(address, "an earlier unbind of it has not returned")


def _hexadecimal_fields(text: str) -> PciId:
    """Vendor and device as sscanf reads them; EINVAL with fewer."""
    fields: Iterable[str] = text.split()
    numbers = [field for field in fields if _HEX.fullmatch(field.removeprefix("0x"))]
    if len(numbers) < 2:
        reject(errno.EINVAL)
    return (f"{int(numbers[0], 16):04x}", f"{int(numbers[1], 16):04x}")
