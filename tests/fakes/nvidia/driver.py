"""NVIDIA's vGPU host driver as a whole: its parts, and what makes them act."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.nvidia.attributes import NvidiaAttributes
from tests.fakes.nvidia.gpus import DRIVER, NvidiaGpus
from tests.fakes.nvidia.mdevs import NvidiaMdevs
from tests.fakes.nvidia.memory import GpuMemory
from tests.fakes.nvidia.smi import NvidiaSmi
from tests.fakes.nvidia.sriov_manage import SriovManage
from tests.fakes.nvidia.vendor_vfio import VendorVfio
from vfiomgr.paths import MDEV_DEVICES, PCI_DEVICES, PCI_DRIVERS

if TYPE_CHECKING:
    from tests.fakes.drivers import Driver, Drivers
    from tests.fakes.faults import Stuck
    from tests.fakes.mdevs import Mdevs
    from tests.fakes.nvidia.gpus import Gpu
    from tests.fakes.programs import Programs
    from tests.fakes.reactions import Reactions
    from tests.fakes.sriov import Sriov
    from tests.fakes.sysfs import Sysfs
    from tests.fakes.vfio import Vfio

SRIOV_MANAGE = "/usr/lib/nvidia/sriov-manage"
NVIDIA_SMI = "/usr/bin/nvidia-smi"


class NvidiaDriver:
    """Which GPUs there are is `gpus.known`; nothing happens to any other function."""

    def __init__(  # noqa: PLR0913 - it has a hand in each of them
        self,
        memory: str,
        *,
        sysfs: Sysfs,
        drivers: Drivers,
        vfio: Vfio,
        mdevs: Mdevs,
        sriov: Sriov,
    ) -> None:
        self._sysfs = sysfs
        self._drivers = drivers
        self._vfio = vfio
        self._sriov = sriov
        self.gpus = NvidiaGpus(sysfs, drivers, GpuMemory(memory))
        self._mdevs = NvidiaMdevs(self.gpus, mdevs)
        self._vendor = VendorVfio(sysfs, self.gpus, vfio)
        self._attributes = NvidiaAttributes(sysfs, self.gpus, vfio)
        drivers.when_bound.append(self._bound)
        drivers.when_leaving.append(self._leaving)
        drivers.obstacles.append(self._obstacle)
        sriov.when_made.append(self._vendor.made_anew)

    def join(self, reactions: Reactions) -> None:
        """Say what acts on its attributes."""
        stores = {
            "nvidia/vgpu_params": self._attributes.set_params,
            "nvidia/placement_id": self._attributes.set_placement,
        }
        reactions.instances |= stores
        reactions.functions |= stores
        reactions.functions["nvidia/current_vgpu_type"] = self._vendor.set_type

    def bring(self, programs: Programs, stuck: Stuck) -> None:
        """Its programs, which can be run where their files are installed."""
        programs.known[SRIOV_MANAGE] = SriovManage(
            self._sysfs, self._drivers, self._sriov, self.gpus, self._is_used
        )
        programs.known[NVIDIA_SMI] = NvidiaSmi(
            self.gpus,
            is_loaded=lambda: self._sysfs.exists(PCI_DRIVERS / DRIVER),
            is_stuck=lambda: bool(set(stuck.names()) & self.gpus.known.keys()),
        )

    def _is_used(self, gpu: Gpu) -> bool:
        """Whether a process has the GPU, or a guest one of its vGPUs: no unbindLock then."""
        held = gpu.address in self._drivers.known[DRIVER].holds
        return held or bool(self.open_vgpus(gpu))

    def add(self, gpu: Gpu) -> None:
        """A GPU, before its function is there."""
        self.gpus.known[gpu.address] = gpu

    def reboot(self) -> None:
        """Nothing but MIG is remembered."""
        self.gpus.known.clear()
        self.gpus.memory.reboot()

    def _bound(self, driver: Driver, address: str) -> None:
        if driver.name == DRIVER:
            self._vendor.bound(address)

    def _leaving(self, driver: Driver, address: str) -> None:
        if driver.name != DRIVER:
            return
        self._vendor.leaving(address)
        if address in self.gpus.known:
            self._sriov.disable(PCI_DEVICES / address)
            self.gpus.memory.reload(address)

    def _obstacle(self, driver: Driver, address: str) -> str | None:
        gpu = self.gpus.known.get(address)
        if driver.name != DRIVER or gpu is None:
            return None
        if self.gpus.is_persistent(gpu):
            return "it is in persistence mode, which keeps a use count of it"
        open_ones = self.open_vgpus(gpu)
        return f"a guest has its vGPU {open_ones[0]} open" if open_ones else None

    def open_vgpus(self, gpu: Gpu) -> list[str]:
        """The vGPUs of a GPU that guests have."""
        return [name for name in self.gpus.vgpus(gpu) if self._is_open(name)]

    def _is_open(self, name: str) -> bool:
        places = (self._sysfs.target(bus / name) for bus in (MDEV_DEVICES, PCI_DEVICES))
        return any(self._vfio.is_open(place) for place in places if place)
