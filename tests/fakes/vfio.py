"""VFIO: which functions it serves, the nodes of groups and devices, and the guests on them."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.fakes.sysfs import READ_ONLY, Sysfs, reject
from vfiomgr.paths import VFIO_CDEVS, VFIO_NODES, HostPath

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.functions import Groups

_CLASS = HostPath("/sys/class/vfio-dev")
_GROUPS = HostPath("/sys/class/vfio")
_MAJOR = 240
_NO_DMA_OF_THEIR_OWN = frozenset({"pcieport", "pci-stub"})
_FIRST_PID = 4242


@dataclass
class Guest:
    """A process that holds a group and has opened those members which VFIO served then.

    On a kernel without groups, it has opened the cdevs of the members instead.
    """

    pid: int
    devices: set[HostPath] = field(default_factory=set)
    cdevs: dict[str, str] = field(default_factory=dict)
    """The descriptor of each cdev that it has open, without groups."""


class Vfio:
    """What drivers/vfio keeps in /sys and /dev."""

    def __init__(self, sysfs: Sysfs, groups: Groups) -> None:
        self._sysfs = sysfs
        self._groups = groups
        self._has_cdev = False
        self.unlinks_first = False
        """Linux 6.12: vfio-dev of a device goes before the kernel waits for its guest."""
        self._has_groups = True
        self.makes_nodes = True
        self.guests: dict[int, Guest] = {}
        self.cold_sleepers: dict[str, bytes] = {}
        self.refusals: list[Callable[[HostPath], int | None]] = []
        """Drivers that tell the errno of opening a device, None where it can be opened."""

    @property
    def has_groups(self) -> bool:
        """CONFIG_VFIO_GROUP."""
        return self._has_groups

    @has_groups.setter
    def has_groups(self, value: bool) -> None:
        """Another kernel, with the same modules loaded."""
        self._has_groups = value
        if not value:
            self._sysfs.drop(_GROUPS)
            self._sysfs.drop(VFIO_NODES / "vfio")
            self._sysfs.drop("/sys/class/misc/vfio")
        elif self._sysfs.exists(_CLASS):
            self.load()

    @property
    def has_cdev(self) -> bool:
        """CONFIG_VFIO_DEVICE_CDEV."""
        return self._has_cdev

    @has_cdev.setter
    def has_cdev(self, value: bool) -> None:
        """Another kernel, with the same modules loaded."""
        self._has_cdev = value
        if self._sysfs.exists(_CLASS):
            self._list_regions()

    def load(self) -> None:
        """The module vfio: its classes, and the node that all containers come from."""
        self._sysfs.make(_CLASS)
        self._list_regions()
        if self.has_groups:
            self._sysfs.make(_GROUPS)
        if self.has_groups and not self._sysfs.exists(VFIO_NODES / "vfio"):
            self._sysfs.put_bytes(VFIO_NODES / "vfio", b"", 0o666)
            self._sysfs.put("/sys/class/misc/vfio/dev", "10:196", READ_ONLY)

    def _list_regions(self) -> None:
        """The device numbers that the module reserves (alloc_chrdev_region)."""
        groups = f"{_MAJOR} vfio\n" * self.has_groups
        cdevs = "511 vfio-dev\n" * self.has_cdev
        text = f"Character devices:\n  1 mem\n{groups}{cdevs}\nBlock devices:\n259 blkext"
        self._sysfs.put("/proc/devices", text, READ_ONLY)

    def serves(self, device: HostPath) -> bool:
        """Whether a driver has registered the device with VFIO."""
        return self._sysfs.exists(device / "vfio-dev")

    def register(self, device: HostPath) -> None:
        """A driver registers a device (vfio_register_group_dev): node of the group, cdev."""
        name = f"vfio{self._sysfs.free_number(_CLASS, 'vfio')}"
        self._sysfs.make(device / "vfio-dev" / name)
        if self.has_cdev:
            self._sysfs.put(device / "vfio-dev" / name / "dev", "511:0", READ_ONLY)
        self._sysfs.link(_CLASS / name, device / "vfio-dev" / name)
        self.show_nodes()

    def unregister(self, device: HostPath) -> None:
        """A driver takes a device back; the last one of a group takes the node along."""
        self._unlink(device)
        for guest in self.guests.values():
            guest.devices.discard(device)
        self.show_nodes()

    def wait_for_guest(self, device: HostPath) -> None:
        """A driver takes a device back that a guest has open (vfio_unregister_group_dev)."""
        if self.unlinks_first:
            self._unlink(device)
            self.show_nodes()

    def _unlink(self, device: HostPath) -> None:
        for name in self._sysfs.names(device / "vfio-dev"):
            self._sysfs.drop(_CLASS / name)
            for guest in self.guests.values():
                if name in guest.cdevs:
                    self._sysfs.drop(guest.cdevs[name])
                    self._sysfs.link_absolute(guest.cdevs[name], f"{VFIO_CDEVS / name} (deleted)")
        self._sysfs.drop(device / "vfio-dev")

    def show_nodes(self) -> None:
        """Bring /dev/vfio in step with what VFIO serves, as devtmpfs does."""
        if not self.makes_nodes:
            return
        served = {_CLASS / name: name for name in self._sysfs.names(_CLASS)}
        places = [self._sysfs.target(link) for link in served]
        groups = {self._groups.of(place.parent.parent) for place in places if place}
        groups |= {number for number, guest in self.guests.items() if guest.devices}
        numbers = {str(n) for n in groups if n is not None and self.has_groups}
        self._show(VFIO_NODES, numbers)
        self._show_class(numbers)
        if self.has_cdev:
            self._show(VFIO_CDEVS, set(served.values()))

    def _show_class(self, wanted: set[str]) -> None:
        """What sysfs tells of the nodes of groups: the kernel's numbers of them."""
        present = set(self._sysfs.names(_GROUPS))
        for name in present - wanted:
            self._sysfs.drop(_GROUPS / name)
        for name in wanted - present:
            self._sysfs.put(_GROUPS / name / "dev", f"{_MAJOR}:{name}", READ_ONLY)

    def _show(self, directory: HostPath, wanted: set[str]) -> None:
        present = set(self._sysfs.names(directory)) - {"vfio", "devices"}
        for name in present - wanted:
            self._sysfs.drop(directory / name)
        for name in wanted - present:
            self._sysfs.put_bytes(directory / name, b"", 0o600)
        if not self._sysfs.names(directory):
            self._sysfs.drop(directory)  # devtmpfs leaves no empty directory of its own

    def open(self, number: int) -> None:
        """A guest takes a group and the devices in it; without groups, the devices alone.

        Raises:
            OSError: ENOENT without node; EBUSY while another guest has it, or a member's native
                driver may do DMA (iommu_group_claim_dma_owner); what a driver refuses itself.

        """
        if self.has_groups and not self._sysfs.exists(VFIO_NODES / str(number)):
            reject(errno.ENOENT)
        members = self._groups.members(number)
        if number in self.guests or any(self._is_native(member) for member in members):
            reject(errno.EBUSY)
        served = {member for member in members if self.serves(member)}
        for member in served:
            self._ask(member)
        guest = Guest(_FIRST_PID + number, served)
        self.guests[number] = guest
        process = f"/proc/{guest.pid}"
        self._sysfs.put(f"{process}/comm", "qemu-system-x86")
        if self.has_groups:
            self._sysfs.link_absolute(f"{process}/fd/12", VFIO_NODES / str(number))
        else:
            names = [name for one in sorted(served) for name in self._sysfs.names(one / "vfio-dev")]
            guest.cdevs = {name: f"{process}/fd/{n}" for n, name in enumerate(names, 12)}
            for name, descriptor in guest.cdevs.items():
                self._sysfs.link_absolute(descriptor, VFIO_CDEVS / name)
        self._settle_group(number)

    def _ask(self, device: HostPath) -> None:
        for ask in self.refusals:
            if number := ask(device):
                reject(number)

    def close(self, number: int) -> set[HostPath]:
        """The guest ends; tells which devices it had open."""
        guest = self.guests.pop(number)
        self._sysfs.drop(f"/proc/{guest.pid}")
        self._settle_group(number)
        return guest.devices

    def is_open(self, device: HostPath) -> bool:
        """Whether a guest has the device itself open."""
        return any(device in guest.devices for guest in self.guests.values())

    def is_owned(self, device: HostPath) -> bool:
        """Whether a guest owns the group of a device."""
        return self._groups.of(device) in self.guests

    def _is_native(self, member: HostPath) -> bool:
        driver = self._sysfs.target_name(member / "driver")
        return driver is not None and driver not in _NO_DMA_OF_THEIR_OWN and not self.serves(member)

    def _settle_group(self, number: int) -> None:
        for member in self._groups.members(number):
            self.settle_power(member)

    def settle_power(self, device: HostPath) -> None:
        """vfio-pci lets an idle function sleep (pm_runtime_put, disable_idle_d3=N).

        Where the platform can cut the power of its slot, it sleeps in D3cold unless d3cold_allowed
        is 0, and reads as all ones; `cold_sleepers` hold what such functions read as awake.
        """
        if not self._sysfs.exists(device / "power/control"):
            return
        idle = self.serves(device) and not self.is_open(device)
        asleep = idle and self._sysfs.get(device / "power/control") == "auto"
        self._sysfs.put(
            device / "power/runtime_status", "suspended" if asleep else "active", READ_ONLY
        )
        awake = self.cold_sleepers.get(device.name)
        cold = awake is not None and self._sysfs.get(device / "d3cold_allowed") == "1"
        state = ("D3cold" if cold else "D3hot") if asleep else "D0"
        self._sysfs.put(device / "power_state", state, READ_ONLY)
        if awake is not None:
            dead = state == "D3cold"
            self._sysfs.put_bytes(device / "config", b"\xff" * len(awake) if dead else awake)
