"""What a fake host is made of: each part is declared once, and there again after a reboot."""

from __future__ import annotations

import errno
from abc import ABC
from typing import TYPE_CHECKING, Self

from tests.fakes.drivers import Driver, PciId
from tests.fakes.faulty import FaultyTree
from tests.fakes.functions import PciFunction
from tests.fakes.mdev_budgets import Pool
from tests.fakes.mdevs import MdevParent, Mdevs, MdevType
from tests.fakes.nvidia.gpus import DRIVER, Gpu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tests.fakes.bars import Bars, FakeBar
    from tests.fakes.disks import Disks
    from tests.fakes.drivers import Drivers
    from tests.fakes.functions import Functions, Link
    from tests.fakes.intel_vfs import IntelGpu, IntelVfs
    from tests.fakes.nvidia.driver import NvidiaDriver
    from tests.fakes.sysfs import Sysfs


class Hardware(FaultyTree, ABC):
    """The builder's side of a kernel, whose parts it needs."""

    sysfs: Sysfs
    functions: Functions
    drivers: Drivers
    mdevs: Mdevs
    nvidia: NvidiaDriver
    intel: IntelVfs
    disks: Disks
    bars: Bars
    _has_iommu: bool
    _declared: list[Callable[[], None]]

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
    ) -> Self:
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
        late_group: int | None = None,
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
        vf_vectors: tuple[int, int] | None = None,
        link: Link | None = None,
    ) -> Self:
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
            late_group=late_group,
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
            vf_vectors=vf_vectors,
            link=link,
        )

        def boot() -> None:
            directory = self.functions.add(function)
            if driver_override:
                self.drivers.set_override(directory, driver_override)
            if driver:
                self.drivers.attach(driver, address)

        return self._declare(boot)

    def add_bars(self, address: str, *bars: FakeBar) -> Self:
        """Large BARs of a function, some of which may be resizable."""

        def boot() -> None:
            self.bars.add(address, bars)

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
    ) -> Self:
        """A parent whose types draw on one pool: a function while `driver` has it, or virtual.

        `place` is an address, or a path such as /sys/devices/virtual/mbochs/mbochs.
        """
        budget = Pool(pool, same_cost_only, full)
        return self.add_parent(MdevParent(place, driver, mdev_driver, tuple(types), budget))

    def add_parent(self, parent: MdevParent) -> Self:
        """A parent of mediated devices, of any manners."""

        def boot() -> None:
            self.mdevs.parents[parent.place] = parent
            if not parent.is_pci or self.drivers.driver_of(parent.place) == parent.driver:
                self.mdevs.register(parent)

        return self._declare(boot)

    def add_gpu(
        self,
        gpu: Gpu,
        *,
        group: int,
        bridge: str | None = None,
        numa_node: int = 0,
        link: Link | None = None,
    ) -> Self:
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
            link=link,
        )

    def add_intel_gpu(
        self, gpu: IntelGpu, *, device: str, group: int, bridge: str | None = None
    ) -> Self:
        """A GPU whose virtual functions have quotas, on its driver, which is added before."""
        card = f"drm/card{len(self.intel.known)}"
        self._declare(lambda: self.intel.known.update({gpu.address: gpu}))
        return self.add_pci(
            gpu.address,
            vendor="8086",
            device=device,
            class_code="038000",
            group=group,
            driver=gpu.driver,
            bridge=bridge,
            total_vfs=gpu.total_vfs,
            vf_offset=1,
            vf_stride=1,
            gives=[("drm", card)],
        )

    def mount(self, node: str, where: str) -> Self:
        """A mounted file system: ("/dev/nvme0n1p2", "/")."""

        def boot() -> None:
            self.disks.claim(node)
            self._append("/proc/mounts", f"{node} {where} ext4 rw 0 0")

        return self._declare(boot)

    def default_route(self, interface: str) -> Self:
        """An interface that carries the default route."""
        row = f"{interface}\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0"
        return self._declare(lambda: self._append("/proc/net/route", row))

    def _append(self, path: str, line: str) -> None:
        self.sysfs.put(path, f"{self.sysfs.get(path)}\n{line}".lstrip("\n"))

    def _declare(self, boot: Callable[[], None]) -> Self:
        self._declared.append(boot)
        boot()
        return self
