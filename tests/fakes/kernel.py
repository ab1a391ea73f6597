"""A reactive kernel: a HostTree over real files and links whose writes act as the kernel's do.

    kernel = FakeKernel(tmp_path / "host")
    kernel.add_driver("bochs-drm", module="bochs", ids=[("1234", "1111")])
    kernel.add_pci("0000:00:01.0", vendor="1234", device="1111", group=1, driver="bochs-drm")
    kernel.fail(at=2, errno=errno.EBUSY)

Operations are counted from 1: each `write`, `replace`, `remove`, `make_directory`, `load_module`.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import TYPE_CHECKING

from tests.fakes.attributes import Attributes
from tests.fakes.drivers import Driver, Drivers, PciId
from tests.fakes.faults import Stuck, sleep_while_anybody_cares
from tests.fakes.faulty import FaultyTree, modprobe_failed
from tests.fakes.functions import Functions, Groups, PciFunction
from tests.fakes.machine import lay_out_machine
from tests.fakes.mdev_budgets import Pool
from tests.fakes.mdevs import UUID, MdevParent, Mdevs, MdevType
from tests.fakes.nvidia.driver import NvidiaDriver
from tests.fakes.nvidia.gpus import DRIVER, Gpu
from tests.fakes.programs import Programs
from tests.fakes.reactions import Reactions
from tests.fakes.sriov import Sriov
from tests.fakes.sysfs import UNASSIGNED, Sysfs, reject, unsigned
from tests.fakes.vfio import Vfio
from vfiomgr.model.path import HostPath
from vfiomgr.model.reset import CONFIG_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.fakes.programs import Program, Said

_VOLATILE = ("/sys", "/dev", "/proc", "/run")
_READABLE = 0o444
_WRITABLE = 0o222
_UNDER_LOCK = ("driver_override", "sriov_numvfs", "uevent")
_RESCAN = "/sys/bus/pci/rescan"
_MODULES = re.compile(
    r"/sys/module(/.*)?|/sys/bus/pci/drivers/[^/]+(/[a-z_]+)?|/dev/vfio(/vfio)?|/sys/class/vfio-dev"
)


class FakeKernel(FaultyTree):
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
        self._boots = 0
        self.sysfs = Sysfs(self.root)
        self.groups = Groups(self.sysfs)
        self.functions = Functions(self.sysfs, self.groups)
        self.functions.has_override = has_override
        self.vfio = Vfio(self.sysfs, self.groups)
        self.vfio.has_cdev = has_cdev
        self.drivers = Drivers(self.sysfs, self.functions, self.vfio, self.stuck)
        self.mdevs = Mdevs(self.sysfs, self.groups, self.vfio, self.stuck)
        self.sriov = Sriov(self.sysfs, self.functions, self.groups, self.drivers)
        self.attributes = Attributes(self.sysfs, self.functions, self.vfio)
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
        self._reactions.functions |= {
            "power/control": self.attributes.set_power_control,
            "d3cold_allowed": self.attributes.set_d3cold_allowed,
            "reset_method": self.attributes.set_reset_method,
            "reset": self.attributes.reset,
            "remove": self._remove_function,
            "sriov_numvfs": self.sriov.set_number,
            "sriov_drivers_autoprobe": self.sriov.set_autoprobe,
        }
        self.nvidia.join(self._reactions)
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

    def locate(self, path: HostPath) -> str:
        """As the real tree, but no link is remembered: links change here."""
        self._directories.clear()
        return super().locate(path)

    def read_bytes(self, path: HostPath, limit: int = 1 << 16) -> bytes | None:
        """As the real tree; some attributes say nothing, to root neither."""
        return super().read_bytes(path, limit) if self._answers(path) else None

    def read_whole(self, path: HostPath) -> bytes | None:
        """As the real tree, with the same exceptions."""
        return super().read_whole(path) if self._answers(path) else None

    def read_text(self, path: HostPath, limit: int = -1) -> str | None:
        """As the real tree, with the same exceptions."""
        return super().read_text(path, limit) if self._answers(path) else None

    def _answers(self, path: HostPath) -> bool:
        """Whether a read succeeds: not of write-only attributes, nor of those without a value."""
        try:
            mode = os.stat(self.locate(path)).st_mode
        except OSError:
            return False
        return bool(mode & _READABLE) and not mode & UNASSIGNED

    def read(self, path: HostPath) -> str | None:
        """As the real tree; what is under the lock of a stuck device never answers."""
        if self.stuck.really and self._is_locked(path):
            sleep_while_anybody_cares()
        return super().read(path)

    def _is_locked(self, path: HostPath) -> bool:
        return path.name in _UNDER_LOCK and path.parent.name in self.stuck.names()

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
        where = HostPath(os.path.realpath(real).removeprefix(self.root))
        if not self._reactions.act(where, text):
            self.sysfs.put(where, text.removesuffix("\n"))

    # ---- what a host is made of; `reboot` makes it so again

    def add_driver(  # noqa: PLR0913 - each is a fact of its own, with a default
        self,
        name: str,
        *,
        module: str | None = "",
        ids: Iterable[PciId] = (),
        loaded: bool = True,
        is_vfio: bool = False,
        manages_dma: bool = False,
        configures_sriov: bool | None = None,
    ) -> FakeKernel:
        """A driver; its module has its name unless told, and None is built in.

        An id is (vendor, device) or (vendor, device, start of class), with `*` for any.
        """
        driver = Driver(
            name=name,
            module=name if module == "" else module,
            ids=tuple(ids),
            is_vfio=is_vfio,
            manages_dma=manages_dma,
            configures_sriov=not is_vfio if configures_sriov is None else configures_sriov,
        )

        def boot() -> None:
            driver.holds.clear()
            driver.dynamic_ids.clear()
            self.drivers.known[name] = driver
            if loaded:
                self.drivers.register(driver)

        return self._declare(boot)

    def add_pci(  # noqa: PLR0913 - each is a fact of its own, with a default
        self,
        address: str,
        *,
        vendor: str,
        device: str,
        class_code: str = "038000",
        group: int | None = None,
        driver: str | None = None,
        driver_override: str | None = None,
        bridge: str | None = None,
        subsystem: str = "1af4:1100",
        header_type: int = 0,
        boot_vga: bool | None = None,
        numa_node: int = -1,
        reset_methods: str = "flr bus",
        gives: Iterable[tuple[str, str]] = (),
        total_vfs: int = 0,
        vf_device: str = "",
        vf_offset: int = 0x80,
        vf_stride: int = 4,
    ) -> FakeKernel:
        """A function, after its bridge and on `driver`, which is added before; None has none.

        `gives` are (class, path below the function) that a native driver makes: ("drm",
        "drm/card1"), ("net", "net/eth0"), ("block", "nvme/nvme0/nvme0n1").
        """
        function = PciFunction(
            address=address,
            vendor=vendor,
            device=device,
            class_code=class_code,
            group=group if self._has_iommu else None,
            bridge=bridge,
            subsystem=subsystem,
            header_type=header_type,
            boot_vga=boot_vga,
            numa_node=numa_node,
            reset_methods=reset_methods,
            gives=tuple(gives),
            total_vfs=total_vfs,
            vf_device=vf_device or device,
            vf_offset=vf_offset,
            vf_stride=vf_stride,
        )

        def boot() -> None:
            directory = self.functions.add(function)
            if driver_override:
                self.drivers.set_override(directory, driver_override)
            if driver:
                self.drivers.attach(driver, address)

        return self._declare(boot)

    def add_mdev_parent(  # noqa: PLR0913 - each is a fact of its own, with a default
        self,
        place: str,
        *,
        types: Iterable[MdevType],
        pool: int,
        driver: str = "",
        mdev_driver: str = "vfio_mdev",
        same_cost_only: bool = False,
        full: int = errno.ENOSPC,
    ) -> FakeKernel:
        """A parent whose types draw on one pool: a function while `driver` has it, or virtual.

        `place` is an address, or a path such as /sys/devices/virtual/mbochs/mbochs.
        """
        budget = Pool(pool, same_cost_only, full)
        return self.add_parent(MdevParent(place, driver, mdev_driver, tuple(types), budget))

    def add_parent(self, parent: MdevParent) -> FakeKernel:
        """A parent of mediated devices, of any manners."""

        def boot() -> None:
            self.mdevs.parents[parent.place] = parent
            if not parent.is_pci or self.drivers.driver_of(parent.place) == parent.driver:
                self.mdevs.register(parent)

        return self._declare(boot)

    def add_gpu(
        self, gpu: Gpu, *, group: int, bridge: str | None = None, numa_node: int = 0
    ) -> FakeKernel:
        """A GPU that makes vGPUs, on the driver nvidia, which is added before."""
        self._declare(lambda: self.nvidia.add(gpu))
        return self.add_pci(
            gpu.address,
            vendor="10de",
            device=gpu.card.device,
            class_code="030200",
            subsystem="10de:0001",
            group=group,
            driver=DRIVER,
            bridge=bridge,
            numa_node=numa_node,
            total_vfs=gpu.total_vfs,
            vf_offset=4,
            vf_stride=1,
        )

    def mount(self, node: str, where: str) -> FakeKernel:
        """A mounted file system: ("/dev/nvme0n1p2", "/")."""
        return self._declare(lambda: self._append("/proc/mounts", f"{node} {where} ext4 rw 0 0"))

    def default_route(self, interface: str) -> FakeKernel:
        """An interface that carries the default route."""
        row = f"{interface}\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0"
        return self._declare(lambda: self._append("/proc/net/route", row))

    def _append(self, path: str, line: str) -> None:
        self.sysfs.put(path, f"{self.sysfs.get(path)}\n{line}".lstrip("\n"))

    def _declare(self, boot: Callable[[], None]) -> FakeKernel:
        self._declared.append(boot)
        boot()
        return self

    # ---- what happens to a host

    def reboot(self) -> None:
        """All that the kernel holds in memory is as it was built; files of /var stay.

        Faults that are to come are forgotten: another process begins, too.
        """
        self._boots += 1
        self.heal()
        self.vfio.guests.clear()
        self.vfio.cold_sleepers.clear()
        self.sriov.room.clear()
        self.sriov.grants.clear()
        self.attributes.killed_by_reset.clear()
        self.attributes.emptied_by_reset.clear()
        self.functions.known.clear()
        self.drivers.known.clear()
        self.mdevs.parents.clear()
        self.nvidia.reboot()
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

    def _rescan(self, text: str) -> None:
        if unsigned(text):
            for address in [a for a in self.functions.known if not self.functions.directory(a)]:
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
