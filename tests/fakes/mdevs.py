"""Mediated devices: parents, types, create and remove (drivers/vfio/mdev/mdev_{core,sysfs}.c)."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.fakes.sysfs import READ_ONLY, WRITE_ONLY, Sysfs, reject, unsigned
from vfiomgr.model.path import MDEV_DEVICES, MDEV_PARENTS, PCI_DEVICES, HostPath

if TYPE_CHECKING:
    from tests.fakes.drivers import Driver
    from tests.fakes.faults import Stuck
    from tests.fakes.functions import Groups
    from tests.fakes.vfio import Vfio

UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_UUID_LENGTH = 36
_TYPES = "mdev_supported_types"


@dataclass(frozen=True)
class MdevType:
    """A type; `cost` is what one instance takes from the parent's pool, e.g. MB of framebuffer."""

    id: str
    cost: int
    name: str = ""
    description: str | None = None
    device_api: str = "vfio-pci"


@dataclass(frozen=True)
class MdevParent:
    """What a driver registers; `place` is a PCI address or a path below /sys/devices.

    With `same_cost_only` all instances of a parent have one cost, as NVIDIA's time-sliced vGPUs.
    `full` is the driver's errno when nothing is left: ENOSPC of mbochs, EUSERS of mdev itself.
    """

    place: str
    driver: str
    mdev_driver: str
    types: tuple[MdevType, ...]
    pool: int
    same_cost_only: bool = False
    full: int = errno.ENOSPC

    @property
    def is_pci(self) -> bool:
        """Whether a PCI driver registers it, and takes it away with itself."""
        return not self.place.startswith("/")

    @property
    def directory(self) -> HostPath:
        """The parent's directory, perhaps by a link."""
        return PCI_DEVICES / self.place if self.is_pci else HostPath(self.place)

    def type(self, type_id: str) -> MdevType:
        """One of its types."""
        return next(kind for kind in self.types if kind.id == type_id)


class Mdevs:
    """/sys/class/mdev_bus and /sys/bus/mdev; what exists is what the directories hold."""

    def __init__(self, sysfs: Sysfs, groups: Groups, vfio: Vfio, stuck: Stuck) -> None:
        self._sysfs = sysfs
        self._groups = groups
        self._vfio = vfio
        self._stuck = stuck
        self.parents: dict[str, MdevParent] = {}

    def register(self, parent: MdevParent) -> None:
        """mdev_register_parent: types, and a link in the class."""
        self._vfio.load()
        self._sysfs.make(MDEV_DEVICES)
        self._sysfs.make(parent.directory)
        directory = self._resolved(parent)
        self._sysfs.make(f"/sys/bus/mdev/drivers/{parent.mdev_driver}")
        for kind in parent.types:
            place = directory / _TYPES / kind.id
            self._sysfs.make(place / "devices")
            self._sysfs.put(place / "create", "", WRITE_ONLY)
            self._sysfs.put(place / "name", kind.name or kind.id, READ_ONLY)
            self._sysfs.put(place / "device_api", kind.device_api, READ_ONLY)
            if kind.description is not None:
                self._sysfs.put(place / "description", kind.description, READ_ONLY)
        self._sysfs.link(MDEV_PARENTS / directory.name, directory)
        self._count(parent)

    def unregister(self, parent: MdevParent) -> None:
        """mdev_unregister_parent: every instance goes, then the types."""
        directory = self._resolved(parent)
        self._sysfs.drop(MDEV_PARENTS / directory.name)
        for uuid in self._instances(parent):
            self._finish_remove(uuid)
        self._sysfs.drop(directory / _TYPES)

    def bound(self, driver: Driver, address: str) -> None:
        """A PCI driver has taken a function: perhaps it registers a parent."""
        if parent := self._parent_of(driver, address):
            self.register(parent)

    def leaving(self, driver: Driver, address: str) -> None:
        """A PCI driver lets go of a function."""
        if parent := self._parent_of(driver, address):
            self.unregister(parent)

    def obstacle(self, driver: Driver, address: str) -> str | None:
        """A parent cannot go while a guest has one of its instances open."""
        parent = self._parent_of(driver, address)
        held = [u for u in self._instances(parent) if self._is_open(u)] if parent else []
        return f"a guest has its vGPU {held[0]} open" if held else None

    def create(self, directory: HostPath, type_id: str, text: str) -> None:
        """create_store, with the directory of the parent.

        Raises:
            OSError: EINVAL for no UUID, EEXIST for one that any parent has, or the driver's errno.

        """
        parent = self._parent_at(directory)
        uuid = text[:_UUID_LENGTH].lower()
        if not _UUID_LENGTH <= len(text) <= _UUID_LENGTH + 1 or not UUID.fullmatch(uuid):
            reject(errno.EINVAL)
        if self._sysfs.exists(MDEV_DEVICES / uuid):
            reject(errno.EEXIST)
        if self._available(parent, parent.type(type_id)) < 1:
            reject(parent.full)
        self._add(parent, directory, type_id, uuid)

    def _add(self, parent: MdevParent, directory: HostPath, type_id: str, uuid: str) -> None:
        place = directory / uuid
        self._sysfs.put(place / "remove", "", WRITE_ONLY)
        self._sysfs.put(place / "uevent", f"DRIVER={parent.mdev_driver}")
        self._sysfs.link(place / "mdev_type", directory / _TYPES / type_id)
        self._sysfs.link(place / "driver", f"/sys/bus/mdev/drivers/{parent.mdev_driver}")
        self._sysfs.link(place / "subsystem", "/sys/bus/mdev")
        self._sysfs.link(f"/sys/bus/mdev/drivers/{parent.mdev_driver}/{uuid}", place)
        self._sysfs.link(directory / _TYPES / type_id / "devices" / uuid, place)
        self._sysfs.link(MDEV_DEVICES / uuid, place)
        # vfio_noiommu_group_alloc names the groups of mdevs so too, though they are no no-IOMMU.
        self._groups.join(self._groups.fresh(), place, "unknown", "vfio-noiommu")
        self._vfio.register(place)
        self._count(parent)

    def remove(self, directory: HostPath, text: str) -> None:
        """remove_store: any number but 0 removes; an open instance makes the writer wait."""
        if unsigned(text) == 0:
            return
        self._sysfs.drop(directory / "remove")
        if self._is_open(directory.name):
            self._stuck.forever(directory.name, "a guest has the vGPU open")
        self._finish_remove(directory.name)

    def retry_stuck(self, uuid: str) -> None:
        """A removal that hung goes on once no guest has the instance."""
        if not self._is_open(uuid):
            self._finish_remove(uuid)

    def _finish_remove(self, uuid: str) -> None:
        place = self._sysfs.target(MDEV_DEVICES / uuid)
        if place is None:
            return
        parent = self._parent_at(place.parent)
        type_id = self._sysfs.target_name(place / "mdev_type") or ""
        self._vfio.unregister(place)
        self._groups.leave(place)
        self._sysfs.drop(f"/sys/bus/mdev/drivers/{parent.mdev_driver}/{uuid}")
        self._sysfs.drop(place.parent / _TYPES / type_id / "devices" / uuid)
        self._sysfs.drop(MDEV_DEVICES / uuid)
        self._sysfs.drop(place)
        self._vfio.show_nodes()
        self._stuck.forget(uuid)
        self._count(parent)

    def _is_open(self, uuid: str) -> bool:
        place = self._sysfs.target(MDEV_DEVICES / uuid)
        return place is not None and self._vfio.is_open(place)

    def _resolved(self, parent: MdevParent) -> HostPath:
        directory = self._sysfs.target(parent.directory)
        if directory is None:
            message = f"the parent {parent.place} is not there"
            raise ValueError(message)
        return directory

    def _parent_at(self, directory: HostPath) -> MdevParent:
        return next(p for p in self.parents.values() if p.directory.name == directory.name)

    def _parent_of(self, driver: Driver, address: str) -> MdevParent | None:
        parent = self.parents.get(address)
        return parent if parent is not None and parent.driver == driver.name else None

    def _instances(self, parent: MdevParent) -> list[str]:
        directory = self._resolved(parent)
        return [name for name in self._sysfs.names(directory) if UUID.fullmatch(name)]

    def _costs(self, parent: MdevParent) -> list[int]:
        directory = self._resolved(parent)
        types = [
            self._sysfs.target_name(directory / uuid / "mdev_type")
            for uuid in self._instances(parent)
        ]
        return [parent.type(type_id).cost for type_id in types if type_id]

    def _available(self, parent: MdevParent, kind: MdevType) -> int:
        costs = self._costs(parent)
        if parent.same_cost_only and costs and costs[0] != kind.cost:
            return 0
        return (parent.pool - sum(costs)) // kind.cost

    def _count(self, parent: MdevParent) -> None:
        """Every type of a parent is counted anew: they share its pool."""
        directory = self._resolved(parent)
        for kind in parent.types:
            available = str(self._available(parent, kind))
            place = directory / _TYPES / kind.id
            self._sysfs.put(place / "available_instances", available, READ_ONLY)
