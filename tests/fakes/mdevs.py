"""Mediated devices: parents, types, create and remove (drivers/vfio/mdev/mdev_{core,sysfs}.c)."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.fakes.sysfs import READ_ONLY, WRITE_ONLY, Sysfs, reject, unsigned
from vfiomgr.paths import MDEV_DEVICES, MDEV_PARENTS, PCI_DEVICES, HostPath

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.fakes.drivers import Driver
    from tests.fakes.faults import Stuck
    from tests.fakes.functions import Groups
    from tests.fakes.mdev_budgets import Budget
    from tests.fakes.vfio import Vfio

UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_UUID_LENGTH = 36
_TYPES = "mdev_supported_types"


Extra = tuple[str, str, int]
"""An attribute that the driver gives an instance: path below it, text, mode."""


@dataclass(frozen=True)
class MdevType:
    """A type; `cost` is what one instance takes from a pool, e.g. MB of framebuffer.

    With None as its `name` it has no such attribute: that was the driver's own affair before 6.1.
    """

    id: str
    cost: int = 1
    name: str | None = ""
    description: str | None = None
    device_api: str = "vfio-pci"


def _no_extras(_kind: MdevType, _uuid: str) -> Iterable[Extra]:
    return ()


@dataclass(frozen=True)
class MdevParent:
    """What a driver registers; `place` is a PCI address or a path below /sys/devices.

    `extras` are the attributes that it gives an instance of a type and UUID.
    """

    place: str
    driver: str
    mdev_driver: str
    types: tuple[MdevType, ...]
    budget: Budget
    extras: Callable[[MdevType, str], Iterable[Extra]] = _no_extras

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
        self.finders: list[Callable[[str], MdevParent | None]] = []
        """Those who know parents that come and go, by their places."""

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
            if kind.name is not None:
                self._sysfs.put(place / "name", kind.name or kind.id, READ_ONLY)
            self._sysfs.put(place / "device_api", kind.device_api, READ_ONLY)
            if kind.description is not None:
                self._sysfs.put(place / "description", kind.description, READ_ONLY)
        self._sysfs.link(MDEV_PARENTS / directory.name, directory)
        self._show(parent, self._counts(parent))

    def unregister(self, parent: MdevParent) -> None:
        """mdev_unregister_parent: every instance goes, then the types."""
        directory = self._resolved(parent)
        self._sysfs.drop(MDEV_PARENTS / directory.name)
        for uuid in self.instances(parent):
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
        held = [u for u in self.instances(parent) if self._is_open(u)] if parent else []
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
        if self._counts(parent)[type_id] < 1:
            reject(parent.budget.full)
        self._add(parent, directory, type_id, uuid)

    def _add(self, parent: MdevParent, directory: HostPath, type_id: str, uuid: str) -> None:
        place = directory / uuid
        for path, text, mode in list(parent.extras(parent.type(type_id), uuid)):
            self._sysfs.put(place / path, text, mode)
        self._sysfs.put(place / "remove", "", WRITE_ONLY)
        self._sysfs.put(place / "power/runtime_status", "unsupported", READ_ONLY)
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
        self.recount(parent)

    def remove(self, directory: HostPath, text: str) -> None:
        """remove_store: any number but 0 removes; an open instance makes the writer wait."""
        try:
            number = unsigned(text)
        except OSError:
            reject(errno.EINVAL)  # ERANGE too
        if number == 0:
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
        self.recount(parent)

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
        parent = next(
            (p for p in self.parents.values() if p.directory.name == directory.name), None
        ) or self._find(directory.name)
        if parent is None:
            message = f"{directory} is no parent"
            raise ValueError(message)
        return parent

    def _find(self, place: str) -> MdevParent | None:
        found = self.parents.get(place)
        others = (find(place) for find in self.finders)
        return found or next((parent for parent in others if parent), None)

    def _parent_of(self, driver: Driver, address: str) -> MdevParent | None:
        parent = self._find(address)
        return parent if parent is not None and parent.driver == driver.name else None

    def instances(self, parent: MdevParent) -> list[str]:
        """The UUIDs of those that a parent has."""
        directory = self._sysfs.target(parent.directory)
        names = self._sysfs.names(directory) if directory else []
        return [name for name in names if UUID.fullmatch(name)]

    def typed(self, parent: MdevParent) -> list[tuple[str, str]]:
        """Each instance that a parent has, with its type."""
        links = ((u, parent.directory / u / "mdev_type") for u in self.instances(parent))
        named = ((uuid, self._sysfs.target_name(link)) for uuid, link in links)
        return [(uuid, type_id) for uuid, type_id in named if type_id]

    def _counts(self, parent: MdevParent) -> dict[str, int]:
        taken = [parent.type(type_id) for _, type_id in self.typed(parent)]
        return parent.budget.counts(parent.types, taken)

    def recount(self, parent: MdevParent) -> None:
        """Every type of every parent that draws on the same budget is counted anew.

        Parents that have the same have the same left, and are asked for once.
        """
        known: dict[tuple[str, ...], dict[str, int]] = {}
        for place in dict.fromkeys((parent.place, *parent.budget.sharers)):
            other = self._find(place)
            if other is None:
                continue
            taken = tuple(type_id for _, type_id in self.typed(other))
            if taken not in known:
                known[taken] = self._counts(other)
            self._show(other, known[taken])

    def _show(self, parent: MdevParent, counts: dict[str, int]) -> None:
        directory = self._sysfs.target(parent.directory / _TYPES)
        for type_id, count in counts.items() if directory else ():
            place = f"{directory}/{type_id}/available_instances"
            self._sysfs.update(place, str(count), READ_ONLY)
