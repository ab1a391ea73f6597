"""NVIDIA's vGPUs as mediated devices: of a GPU itself, or of its virtual functions, one each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tests.fakes.mdevs import MdevParent, MdevType
from tests.fakes.nvidia.attributes import shown
from tests.fakes.nvidia.gpus import DRIVER, Gpu, NvidiaGpus
from tests.fakes.nvidia.rules import Seat

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.fakes.mdevs import Extra, Mdevs
    from tests.fakes.nvidia.cards import VgpuKind

_MDEV_DRIVER = "nvidia-vgpu-vfio"
_ATTRIBUTES = ("nvidia/vgpu_params", "nvidia/placement_id")


@dataclass(frozen=True)
class _GpuBudget:
    """The rules of a GPU, as one of its parents sees them.

    Before the first vGPU every type of every virtual function says 1, though all share the GPU.
    """

    gpus: NvidiaGpus
    gpu: Gpu

    @property
    def full(self) -> int:
        """Whatever is in the way."""
        return self.gpu.manners.full

    @property
    def sharers(self) -> Sequence[str]:
        """All virtual functions."""
        return self.gpus.virtual(self.gpu)

    def counts(self, types: Sequence[MdevType], taken: Sequence[MdevType]) -> dict[str, int]:
        """One or none on a virtual function, the whole rest on a GPU without them."""
        rules = self.gpus.rules(self.gpu)
        kinds = ((kind.id, self.gpu.kind(kind.id)) for kind in types)
        if self.gpu.family == "mdev":
            return {type_id: rules.more(kind) if kind else 0 for type_id, kind in kinds}
        there = set() if taken else {kind.number for kind in rules.creatable()}
        return {type_id: int(kind is not None and kind.number in there) for type_id, kind in kinds}


class NvidiaMdevs:
    """The parents that the driver registers."""

    def __init__(self, gpus: NvidiaGpus, mdevs: Mdevs) -> None:
        self._gpus = gpus
        self._mdevs = mdevs
        self._parents: dict[str, MdevParent] = {}
        mdevs.finders.append(self.parent)
        gpus.tenants.append(self.tenants)
        gpus.when_changed.append(self.recount)

    def parent(self, address: str) -> MdevParent | None:
        """What a function is registered as; None for those that make no mediated devices."""
        gpu = self._gpus.of(address)
        if gpu is None or gpu.family == "vendor":
            return None
        if (gpu.family == "mdev") != (gpu.address == address):
            return None
        known = self._parents.get(address)
        if known is None:
            known = self._parents[address] = self._made(gpu, address)
        return known

    def _made(self, gpu: Gpu, address: str) -> MdevParent:
        types = tuple(
            MdevType(f"{gpu.prefix}-{k.number}", k.framebuffer, k.name, k.description)
            for k in gpu.card.kinds
        )

        budget = _GpuBudget(self._gpus, gpu)
        return MdevParent(address, DRIVER, _MDEV_DRIVER, types, budget, partial(self._begin, gpu))

    def _begin(self, gpu: Gpu, kind: MdevType, uuid: str) -> Iterable[Extra]:
        """A new one takes its seat, and shows its attributes."""
        seat = self._gpus.rules(gpu).seat(gpu.kind(kind.id))
        if isinstance(seat, Seat):
            self._gpus.seat(gpu, uuid, seat)
            yield from (row for row in shown(seat) if row[0] in _ATTRIBUTES)

    def tenants(self, gpu: Gpu, address: str) -> dict[str, VgpuKind]:
        """The mediated devices of a function."""
        parent = self.parent(address)
        if parent is None:
            return {}
        pairs = ((uuid, gpu.kind(type_id)) for uuid, type_id in self._mdevs.typed(parent))
        return {uuid: kind for uuid, kind in pairs if kind}

    def recount(self, gpu: Gpu) -> None:
        """What the GPU is set to has changed."""
        for address in (gpu.address, *self._gpus.virtual(gpu)):
            parent = self.parent(address)
            if parent is not None:
                self._mdevs.recount(parent)
                return
