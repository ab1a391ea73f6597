"""A reactive kernel: a HostTree over real files and links whose writes act as the kernel's do.

    kernel = FakeKernel(tmp_path / "host")
    kernel.add_driver("bochs-drm", module="bochs", ids=[("1234", "1111")])
    kernel.add_pci("0000:00:01.0", vendor="1234", device="1111", group=1, driver="bochs-drm")
    kernel.fail(at=2, errno=errno.EBUSY)

Operations are counted from 1: each `write`, `replace`, `remove`, `make_directory`, `load_module`,
and each program that is run and changes something.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import TYPE_CHECKING

from tests.fakes.attributes import Attributes
from tests.fakes.bars import Bars
from tests.fakes.disks import Disks
from tests.fakes.drivers import Driver, Drivers
from tests.fakes.faults import Stuck, sleep_while_anybody_cares
from tests.fakes.faulty import modprobe_failed
from tests.fakes.functions import Functions, Groups
from tests.fakes.hardware import Hardware
from tests.fakes.intel_vfs import IntelVfs
from tests.fakes.machine import lay_out_machine
from tests.fakes.mdevs import UUID, Mdevs
from tests.fakes.nvidia.driver import NvidiaDriver
from tests.fakes.programs import Programs
from tests.fakes.reactions import Reactions
from tests.fakes.rom import Roms
from tests.fakes.sriov import Sriov
from tests.fakes.sysfs import UNASSIGNED, Sysfs, reject, unsigned
from tests.fakes.vfio import Vfio
from vfiomgr.host.inside import MOST_LINKS, Inside
from vfiomgr.pci.capabilities import CONFIG_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.fakes.laptop import AsusFirmware
    from tests.fakes.programs import Program, Said
    from vfiomgr.paths import HostPath

_VOLATILE = ("/sys", "/dev", "/proc", "/run")
_READABLE = 0o444
_WRITABLE = 0o222
_UNDER_LOCK = ("driver_override", "sriov_numvfs", "sriov_vf_total_msix", "uevent")
_RESCAN = "/sys/bus/pci/rescan"
_RESCAN_BUS = re.compile(r"/sys/class/pci_bus/([0-9a-f]{4}:[0-9a-f]{2})/rescan")
_MODULES = re.compile(
    r"/sys/module(/.*)?|/sys/bus/pci/drivers/[^/]+(/[a-z_]+)?|/dev/vfio(/vfio)?"
    r"|/sys/class/(vfio-dev|vfio|misc(/vfio(/dev)?)?)"
)


class _Inside(Inside):
    """As the real one, but links are remembered only until one changes."""

    def __init__(self, root: str, is_changed: Callable[[], bool]) -> None:
        super().__init__(root)
        self._is_changed = is_changed

    def directory(self, path: str, links: int = MOST_LINKS) -> str:
        """Forget first, if something has changed."""
        if self._is_changed():
            self.forget()
        return super().directory(path, links)

    def listed_file(self, above: str, name: str) -> str | None:  # noqa: ARG002 - as the real one
        """Have the mode of each file looked at, which says what cannot be read."""
        return None


class FakeKernel(Hardware):
    """One host with a kernel that reacts; `<root>.kernel` beside its root is its memory."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        has_iommu: bool = True,
        has_cdev: bool = False,
        has_override: bool = True,
    ) -> None:
        os.makedirs(root, exist_ok=True)
        memory = f"{os.path.realpath(root)}.kernel"
        self.stuck = Stuck(f"{memory}/stuck")
        super().__init__(root, f"{memory}/record")
        self._has_iommu = has_iommu
        self._declared: list[Callable[[], None]] = []
        self.lookers: list[Callable[[HostPath], None]] = []
        """Called with each directory that is listed."""
        self.unpowered: set[str] = set()
        self._boots = 0
        self.sysfs = Sysfs(self.root)
        self._generation = 0
        self._inside = _Inside(self.root, self._is_changed)
        self.groups = Groups(self.sysfs)
        self.functions = Functions(self.sysfs, self.groups)
        self.functions.has_override = has_override
        self.disks = Disks(self.sysfs)
        self.vfio = Vfio(self.sysfs, self.groups)
        self.vfio.has_cdev = has_cdev
        self.drivers = Drivers(self.sysfs, self.functions, self.vfio, self.stuck)
        self.mdevs = Mdevs(self.sysfs, self.groups, self.vfio, self.stuck)
        self.sriov = Sriov(self.sysfs, self.functions, self.groups, self.drivers)
        self.attributes = Attributes(self.sysfs, self.functions, self.vfio)
        self.roms = Roms(self.sysfs, self.functions)
        self.bars = Bars(self.sysfs, self.functions, self.drivers)
        self.drivers.when_bound.append(self.sriov.bound)
        self.drivers.when_leaving.append(self.sriov.leaving)
        self.drivers.when_bound.append(self.mdevs.bound)
        self.drivers.when_leaving.append(self.mdevs.leaving)
        self.drivers.obstacles.append(self.mdevs.obstacle)
        self.nvidia = NvidiaDriver(
            f"{memory}/gpus",
            sysfs=self.sysfs,
            drivers=self.drivers,
            vfio=self.vfio,
            mdevs=self.mdevs,
            sriov=self.sriov,
        )
        self._reactions = Reactions(self.drivers, self.mdevs)
        self._reactions.buses[_RESCAN] = self._rescan
        self._reactions.others.append((_RESCAN_BUS, lambda bus, text: self._rescan(text, bus[1])))
        self._reactions.functions |= {
            "power/control": self.attributes.set_power_control,
            "d3cold_allowed": self.attributes.set_d3cold_allowed,
            "reset_method": self.attributes.set_reset_method,
            "reset": self.attributes.reset,
            "reset_subordinate": self.attributes.reset_bus,
            "remove": self._remove_function,
            "rom": self.roms.enable,
            "sriov_numvfs": self.sriov.set_number,
            "sriov_drivers_autoprobe": self.sriov.set_autoprobe,
            "sriov_vf_msix_count": self.sriov.set_vectors,
        }
        self._reactions.functions |= self.bars.stores()
        self.nvidia.join(self._reactions)
        self.intel = IntelVfs(self.sysfs, self.sriov)
        self.intel.join(self._reactions)
        self.drivers.when_bound.append(self.intel.bound)
        self.drivers.when_leaving.append(self.intel.leaving)
        self.programs = Programs(self.sysfs)
        self.nvidia.bring(self.programs, self.stuck)
        self.sysfs.make("/var/lib")
        self.reboot()

    @property
    def is_live(self) -> bool:
        """A kernel acts on what is written here."""
        return True

    @property
    def can_hang(self) -> bool:
        """Only where removals hang as they do in a kernel: code must go through children then."""
        return self.stuck.really

    def _is_changed(self) -> bool:
        """Whether links must not be remembered: one has changed, by any process."""
        generation, self._generation = self._generation, self.sysfs.generation
        return self.stuck.really or generation != self._generation

    def read_bytes_in(self, above: str, name: str, limit: int = 1 << 16) -> bytes | None:
        """As the real tree, and more of it at once."""
        return super().read_bytes_in(above, name, limit)

    def children(self, path: HostPath) -> list[str]:
        """As the real tree, and whoever follows that is told."""
        for look in self.lookers:
            look(path)
        return super().children(path)

    def is_claimed(self, path: HostPath, number: str) -> bool | None:
        """What an open with O_EXCL shows, of the device that has this number."""
        if self.sysfs.target_name(f"/sys/dev/block/{number}") != path.name:
            return None
        return self.disks.is_claimed(path)

    def _require_readable(self, mode: int, path: HostPath) -> None:
        """As the real tree; attributes that are write-only or without a value say nothing."""
        super()._require_readable(mode, path)
        if not mode & _READABLE or mode & UNASSIGNED:
            reject(errno.EACCES)

    def read_in(self, above: str, name: str) -> str | None:
        """As the real tree; what is under the lock of a stuck device never answers."""
        if self.stuck.really and self._is_locked(above, name):
            sleep_while_anybody_cares()
        return super().read_in(above, name)

    def _is_locked(self, above: str, name: str) -> bool:
        return name in _UNDER_LOCK and above.rpartition("/")[2] in self.stuck.names()

    def modprobe(self, name: str) -> None:
        """Load what is declared; modprobe takes `-` for `_`."""
        if not self.drivers.load(name):
            release = self.sysfs.get("/proc/sys/kernel/osrelease")
            raise modprobe_failed(
                name, f"FATAL: Module {name} not found in directory /lib/modules/{release}"
            )

    def program(self, name: str) -> Program | None:
        """One whose file is in its place."""
        return self.programs.find(name)

    def execute(self, program: Program, arguments: Sequence[str]) -> Said:
        """Programs change the kernel as writes do, one at a time."""
        with self.stuck.one_at_a_time():
            return program.run(arguments)

    def store(self, path: HostPath, text: str) -> None:
        """Open write-only without creating, then write once."""
        with self.stuck.one_at_a_time():
            self._store(path, text)

    def _store(self, path: HostPath, text: str) -> None:
        real = self.locate(path)
        mode = os.stat(real).st_mode
        if stat.S_ISDIR(mode):
            reject(errno.EISDIR)
        if not mode & _WRITABLE:
            reject(errno.EACCES)  # kernfs checks the mode for root too
        where = self.sysfs.target(real.removeprefix(self.root))
        if where is None:
            reject(errno.ENOENT)
        if not self._reactions.act(where, text):
            self.sysfs.put(where, text.removesuffix("\n"))

    def add_firmware(self, firmware: AsusFirmware) -> None:
        """Switches of the firmware, whose driver is there since boot."""
        firmware.join(self._reactions)
        self._declare(firmware.boot)

    # ---- what happens to a host

    def reboot(self) -> None:
        """All that the kernel holds in memory is as it was built; files of /var stay.

        Faults that are to come are forgotten: another process begins, too.
        """
        self._boots += 1
        self.heal()
        self.vfio.guests.clear()
        self.disks.claimed.clear()
        self.vfio.cold_sleepers.clear()
        self.sriov.room.clear()
        self.sriov.grants.clear()
        self.sriov.added_vectors.clear()
        self.attributes.killed_by_reset.clear()
        self.attributes.emptied_by_reset.clear()
        self.attributes.without_bus_reset.clear()
        self.functions.known.clear()
        self.drivers.known.clear()
        self.mdevs.parents.clear()
        self.nvidia.reboot()
        self.intel.known.clear()
        for name in self.stuck.names():
            self.stuck.forget(name)
        for directory in _VOLATILE:
            self.sysfs.drop(directory)
            self.sysfs.make(directory)
        lay_out_machine(self.sysfs, boot=self._boots, has_iommu=self._has_iommu)
        for boot in self._declared:
            boot()

    def unplug(self, address: str, *, surprise: bool = True) -> None:
        """Take a function away, and all behind it; without surprise, drivers may hang in it."""
        for name in (*self.functions.below(address), address):
            directory = self.functions.directory(name)
            if directory is None:
                continue
            if self.functions.known[name].total_vfs:
                self.sriov.disable(directory, surprise=surprise)
            self.drivers.detach(name, surprise=surprise)
            self.stuck.forget(name)
            self.functions.drop(name)
        self.vfio.show_nodes()

    def plug(self, address: str) -> None:
        """Bring a function back that was unplugged: a new device, without override."""
        self.functions.add(self.functions.known[address])
        try:
            self.drivers.autoprobe(address)
        except OSError:
            return

    def fall_off_bus(self, address: str) -> None:
        """The configuration space reads all ones from now on."""
        directory = self.functions.directory(address)
        if directory is not None:
            self.sysfs.put_bytes(directory / "config", b"\xff" * CONFIG_SIZE)

    def reset_kills(self, address: str) -> None:
        """A reset of the function takes it off the bus, as FLR does with some accelerators."""
        self.attributes.killed_by_reset.add(address)

    def reset_empties(self, address: str) -> None:
        """After a reset the function's command register is 0: the kernel restored nothing."""
        self.attributes.emptied_by_reset.add(address)

    def forbids_bus_reset(self, address: str) -> None:
        """A quirk of the kernel: no bus with this function is reset."""
        self.attributes.without_bus_reset.add(address)

    def sleeps_cold(self, address: str) -> None:
        """The platform puts the function into D3cold, and it does not wake when it is read."""
        config = self.functions.directory(address)
        if config is not None:
            self.vfio.cold_sleepers[address] = self.read_bytes(config / "config") or b""

    def guest_opens(self, group: int) -> None:
        """A guest takes a group: OSError ENOENT without node, EBUSY where it is not viable."""
        self.vfio.open(group)

    def guest_closes(self, group: int) -> None:
        """The guest ends, and removals that hung because of it go on."""
        self.vfio.close(group)
        self._wake()

    def hold(self, address: str) -> None:
        """The function's driver would wait for ever on unbind, as nvidia with a user does."""
        self.drivers.known[self.drivers.driver_of(address) or ""].holds.add(address)

    def let_go(self, address: str) -> None:
        """The last user is gone."""
        for driver in self.drivers.known.values():
            driver.holds.discard(address)
        self._wake()

    def _wake(self) -> None:
        for name in self.stuck.names():
            retry = self.mdevs.retry_stuck if UUID.fullmatch(name) else self.drivers.retry_stuck
            retry(name)

    def _remove_function(self, directory: HostPath, text: str) -> None:
        if unsigned(text):
            self.unplug(directory.name, surprise=False)

    def _rescan(self, text: str, bus: str = "") -> None:
        """All buses, or one (bus_rescan_store and rescan_store in drivers/pci/pci-sysfs.c)."""
        if unsigned(text):
            known = [a for a in self.functions.known if a not in self.unpowered]
            known = [address for address in known if address.startswith(bus)]
            for address in [a for a in known if not self.functions.directory(a)]:
                self.plug(address)

    # ---- what a test looks at

    def driver(self, name: str) -> Driver:
        """A driver, to set its `probe_error`."""
        return self.drivers.known[name]

    def driver_of(self, address: str) -> str | None:
        """The driver that has a function."""
        return self.drivers.driver_of(address)

    def override_of(self, address: str) -> str | None:
        """The function's driver_override."""
        return self.drivers.override(address)

    def state(self, *, modules: bool = True) -> dict[str, str]:
        """All of /sys and /dev: links as `-> target`, attributes as their text, directories `/`.

        Without `modules`, that which loading a module leaves behind does not count.
        """
        found = self.sysfs.picture("/sys", "/dev")
        if modules:
            return found
        return {path: text for path, text in found.items() if not _MODULES.fullmatch(path)}
