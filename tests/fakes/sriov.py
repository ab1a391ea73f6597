"""SR-IOV through sriov_numvfs (drivers/pci/iov.c)."""

from __future__ import annotations

import errno
import re
from typing import TYPE_CHECKING

from tests.fakes.functions import MSIX
from tests.fakes.sysfs import READ_ONLY, Sysfs, reject, unsigned
from vfiomgr.paths import PCI_DEVICES, HostPath
from vfiomgr.pci.model import PciAddress

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.drivers import Driver, Drivers
    from tests.fakes.functions import Functions, Groups, PciFunction

_MAX_U16 = 0xFFFF
_LEAST_VECTORS = 2
_VIRTFN = re.compile(r"virtfn\d+")
_TRUE, _FALSE = re.compile(r"[yYtT1]|[oO][nN]"), re.compile(r"[nNfF0]|[oO][fF]")


class Sriov:
    """Virtual functions come and go as the number of them is written."""

    def __init__(
        self, sysfs: Sysfs, functions: Functions, groups: Groups, drivers: Drivers
    ) -> None:
        self._sysfs = sysfs
        self._functions = functions
        self._groups = groups
        self._drivers = drivers
        self.when_made: list[Callable[[str], None]] = []
        """Those who want to know which function has new virtual ones."""
        self.when_gone: list[Callable[[str], None]] = []
        self.room: dict[str, int] = {}
        self.grants: dict[str, int] = {}
        self.added_vectors: dict[str, int] = {}
        """Vectors that the driver of a physical function adds to each number, as ice does."""

    def set_number(self, directory: HostPath, text: str) -> None:
        """sriov_numvfs_store.

        Raises:
            OSError: ERANGE beyond sriov_totalvfs, ENOENT without a driver that configures SR-IOV,
                EBUSY from one number to another without 0 between, ENOMEM where the firmware left
                `room` for fewer (sriov_enable). A driver that `grants` fewer makes those, and the
                write succeeds.

        """
        wanted = unsigned(text)
        physical = self._functions.known[directory.name]
        if wanted > physical.total_vfs or wanted > _MAX_U16:
            reject(errno.ERANGE)
        present = int(self._sysfs.get(directory / "sriov_numvfs"))
        if wanted == present:
            return
        name = self._drivers.driver_of(physical.address)
        # vfio-pci has no sriov_configure without its module parameter enable_sriov.
        if name is None or not self._drivers.known[name].configures_sriov:
            reject(errno.ENOENT)
        if wanted and present:
            reject(errno.EBUSY)
        if wanted > self.room.get(physical.address, _MAX_U16):
            reject(errno.ENOMEM)
        if wanted:
            granted = self.grants.get(physical.address, wanted)
            for address in self.make(directory, min(wanted, granted)):
                self._drivers.autoprobe(address)
        else:
            self.disable(directory)

    def set_autoprobe(self, directory: HostPath, text: str) -> None:
        """sriov_drivers_autoprobe_store (kstrtobool)."""
        if not (_TRUE.match(text) or _FALSE.match(text)):
            reject(errno.EINVAL)
        flag = "1" if _TRUE.match(text) else "0"
        self._sysfs.put(directory / "sriov_drivers_autoprobe", flag)

    def bound(self, driver: Driver, address: str) -> None:
        """sriov_vf_total_msix_show asks the driver; 0 where it has no sriov_get_vf_total_msix."""
        self._show_total(address, is_able=driver.configures_sriov)

    def leaving(self, _driver: Driver, address: str) -> None:
        """Without a driver it is 0."""
        self._show_total(address, is_able=False)

    def _show_total(self, address: str, *, is_able: bool) -> None:
        vectors = self._functions.known[address].vf_vectors
        if vectors is not None:
            total = str(vectors[0] if is_able else 0)
            self._sysfs.put(PCI_DEVICES / address / "sriov_vf_total_msix", total, READ_ONLY)

    def set_vectors(self, directory: HostPath, text: str) -> None:
        """sriov_vf_msix_count_store; the callback is like that of mlx5_core.

        Raises:
            OSError: EOPNOTSUPP where the driver of the physical function has no callback, EBUSY
                where the virtual one has a driver, EINVAL below 2, EOVERFLOW beyond half of all,
                ENOSPC where the others have too many. 0 is the default.

        """
        wanted = unsigned(text)
        physical = self._functions.known[self._sysfs.target_name(directory / "physfn") or ""]
        owner = PCI_DEVICES / physical.address
        if physical.vf_vectors is None or self._sysfs.get(owner / "sriov_vf_total_msix") == "0":
            reject(errno.EOPNOTSUPP)
        if self._drivers.driver_of(directory.name) is not None:
            reject(errno.EBUSY)
        total, default = physical.vf_vectors
        wanted = wanted + self.added_vectors.get(physical.address, 0) if wanted else default
        if wanted < _LEAST_VECTORS:
            reject(errno.EINVAL)
        if wanted > total // 2:
            reject(errno.EOVERFLOW)
        others = [p for p in self._virtual(owner) if p != directory]
        if wanted + sum(map(self.vectors, others)) > total:
            reject(errno.ENOSPC)
        config = bytearray(self._config(directory))
        config[MSIX + 2 : MSIX + 4] = (wanted - 1).to_bytes(2, "little")
        self._sysfs.put_bytes(directory / "config", bytes(config))

    def vectors(self, directory: HostPath) -> int:
        """The Table Size of a virtual function."""
        return int.from_bytes(self._config(directory)[MSIX + 2 : MSIX + 4], "little") + 1

    def _config(self, directory: HostPath) -> bytes:
        with open(self._sysfs.real(directory / "config"), "rb") as file:
            return file.read()

    def _virtual(self, physical: HostPath) -> list[HostPath]:
        links = [name for name in self._sysfs.names(physical) if _VIRTFN.fullmatch(name)]
        found = (self._sysfs.target(physical / name) for name in links)
        return [path for path in found if path is not None]

    def make(self, directory: HostPath, count: int) -> list[str]:
        """sriov_enable, but for the drivers of the new functions; tells their addresses."""
        physical = self._functions.known[directory.name]
        owner = self._drivers.driver_of(physical.address)
        made = [self._make(physical, directory, index) for index in range(count)]
        for address in made:
            if owner is not None and self._drivers.known[owner].is_vfio:
                # vfio_pci_bus_notifier: the VFs of a function on VFIO are captured.
                self._drivers.set_override(PCI_DEVICES / address, owner)
        self._sysfs.put(directory / "sriov_numvfs", str(count))
        for listener in self.when_made:
            listener(physical.address)
        return made

    def _make(self, physical: PciFunction, directory: HostPath, index: int) -> str:
        group = None if physical.group is None else self._groups.fresh()
        virtual = physical.virtual(_address_of(physical, index), group)
        place = self._functions.add(virtual)
        self._sysfs.link(place / "physfn", directory)
        self._sysfs.link(directory / f"virtfn{index}", place)
        return virtual.address

    def disable(self, directory: HostPath, *, surprise: bool = False) -> None:
        """sriov_disable; hangs where a guest has one of the virtual functions."""
        links = sorted(name for name in self._sysfs.names(directory) if _VIRTFN.fullmatch(name))
        for link in links:
            address = self._sysfs.target_name(directory / link) or ""
            self._drivers.detach(address, surprise=surprise)
            self._sysfs.drop(directory / link)
            self._functions.drop(address)
            self._functions.known.pop(address, None)
        if links and self._sysfs.exists(PCI_DEVICES / directory.name):
            self._sysfs.put(directory / "sriov_numvfs", "0")
        for listener in self.when_gone if links else ():
            listener(directory.name)


def _address_of(physical: PciFunction, index: int) -> str:
    """pci_iov_virtfn_bus and _devfn: routing ids count on from the physical function's."""
    address = PciAddress.parse(physical.address)
    own = address.bus << 8 | address.device << 3 | address.function
    number = own + physical.vf_offset + physical.vf_stride * index
    return str(PciAddress(address.domain, number >> 8, number >> 3 & 0x1F, number & 7))
