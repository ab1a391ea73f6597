"""NVIDIA's GPUs that make vGPUs, and what their host driver does as functions come and go.

Which function has which vGPU is what sysfs says, so that children change the same GPUs.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tests.fakes.nvidia.rules import Rules, Seat
from vfiomgr.paths import PCI_DEVICES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.fakes.drivers import Drivers
    from tests.fakes.nvidia.cards import Card, VgpuKind
    from tests.fakes.nvidia.memory import GpuMemory
    from tests.fakes.nvidia.rules import Reason
    from tests.fakes.sysfs import Sysfs

Family = Literal["mdev", "mdev-sriov", "vendor"]
"""Who makes vGPUs, and how: the GPU as an mdev parent, each VF as one, each VF by its sysfs."""
DRIVER = "nvidia"
_VIRTFN = re.compile(r"virtfn(\d+)")


@dataclass(frozen=True)
class Manners:
    """The errnos of a driver; `empty` is that of taking a type from a VF that has none.

    Those of the driver as shipped: whatever its resource manager refuses is EIO, for mdevs too
    (nv_vgpu_vfio_create).
    """

    unknown: int = errno.EIO
    mismatch: int = errno.EIO
    full: int = errno.EIO
    no_instance: int = errno.EIO
    empty: int = errno.EPERM

    def of(self, reason: Reason) -> int:
        """The errno of a refusal."""
        return {
            "unknown": self.unknown,
            "mismatch": self.mismatch,
            "full": self.full,
            "no instance": self.no_instance,
        }[reason]


SHIPPED = Manners()
UPSTREAM = Manners(errno.ENODEV, errno.EINVAL, errno.ENOSPC, errno.EIO, empty=0)
"""As NVIDIA proposed the driver for Linux itself."""


@dataclass(frozen=True)
class Gpu:
    """One GPU; `prefix` is what its mdev types are named after, the driver of their parent.

    Without `has_header` the list of creatable types is bare, hence empty where there is none.
    """

    address: str
    card: Card
    family: Family
    total_vfs: int = 0
    manners: Manners = SHIPPED
    prefix: str = DRIVER
    is_persistent: bool = True
    has_header: bool = True

    def kind(self, type_id: str) -> VgpuKind | None:
        """The type of an mdev type's name."""
        number = type_id.rpartition("-")[2]
        return self.card.kind(int(number)) if number.isdecimal() else None

    @property
    def uuid(self) -> str:
        """As nvidia-smi names it."""
        digits = re.sub("[^0-9a-f]", "", self.address).zfill(12)
        return f"GPU-8b89b58e-b427-108d-ac50-{digits[-12:]}"


class NvidiaGpus:
    """The GPUs of one host; `tenants` tell the vGPUs that a function has, by their names."""

    def __init__(self, sysfs: Sysfs, drivers: Drivers, memory: GpuMemory) -> None:
        self._sysfs = sysfs
        self._drivers = drivers
        self.memory = memory
        self.known: dict[str, Gpu] = {}
        self.tenants: list[Callable[[Gpu, str], dict[str, VgpuKind]]] = []
        self.when_changed: list[Callable[[Gpu], None]] = []

    def of(self, address: str) -> Gpu | None:
        """The GPU that a function is, or is a virtual function of."""
        physical = self._sysfs.target_name(PCI_DEVICES / address / "physfn")
        return self.known.get(physical or address)

    def is_persistent(self, gpu: Gpu) -> bool:
        """Whether the driver stays initialised while nobody uses the GPU."""
        found = self.memory.is_persistent(gpu.address)
        return gpu.is_persistent if found is None else found

    def virtual(self, gpu: Gpu) -> list[str]:
        """The addresses of its virtual functions, in their order."""
        directory = PCI_DEVICES / gpu.address
        found = [m for name in self._sysfs.names(directory) if (m := _VIRTFN.fullmatch(name))]
        ordered = sorted(found, key=lambda match: int(match[1]))
        return [self._sysfs.target_name(directory / match[0]) or "" for match in ordered]

    def visible(self) -> list[Gpu]:
        """Those that the driver has, in the order in which nvidia-smi counts them."""
        there = (self.known[address] for address in sorted(self.known))
        return [gpu for gpu in there if self._drivers.driver_of(gpu.address) == DRIVER]

    def vgpus(self, gpu: Gpu) -> dict[str, Seat]:
        """All vGPUs of a GPU by name: a UUID, or the address of a virtual function."""
        seats = self.memory.seats(gpu.address)
        names: dict[str, VgpuKind] = {}
        for address in (gpu.address, *self.virtual(gpu)):
            for tell in self.tenants:
                names |= tell(gpu, address)
        return {name: Seat(kind, *seats.get(name, (None, None))) for name, kind in names.items()}

    def rules(self, gpu: Gpu, besides: str = "") -> Rules:
        """What the GPU allows now, as if the vGPU `besides` were not there."""
        taken = [seat for name, seat in self.vgpus(gpu).items() if name != besides]
        return Rules(gpu.card, self.memory.modes(gpu.address), taken)

    def seat(self, gpu: Gpu, name: str, seat: Seat) -> None:
        """Remember where a new vGPU lives."""
        self.memory.sit(gpu.address, name, seat.instance, seat.placement)

    def changed(self, gpu: Gpu) -> None:
        """Something came, went or was set: what other functions show follows."""
        for listener in self.when_changed:
            listener(gpu)
