"""What the vGPUs of a GPU share, as counters, and which vGPUs can be created on it.

The scheduler only adds: it allocates a device while the sum of what devices consume stays within
the counters of their set. Sums express memory and virtual functions. They cannot express that all
vGPUs of a GPU have the same size. Therefore, on such a GPU, each type has one device, which
consumes everything, until a claim or an active vGPU decides the size.

The scheduler counts devices that are published. The device of a claim is published until the claim
is released, and vGPUs that no published device stands for reduce the counters.

A claim that is scheduled while the slices change may get another size. Both claims are then
published, nothing else is offered, and the driver of the GPU refuses the second vGPU.
"""

from __future__ import annotations

from functools import cached_property
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING

from vfiomgr.expressions import expression
from vfiomgr.units import MIB
from vfiomgr.value import Value
from vfiomgr.vgpu.capacity import Gpu, room
from vfiomgr.vgpu.model import Vgpu, VgpuType, lives_in_gpu_instance

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Set as AbstractSet


MEMORY = "memory"
"""The counter of bytes that types of the driver can use."""
FUNCTIONS = "functions"
"""The counter of virtual functions, or of vGPUs where there are none, that can carry a vGPU."""
_LONGEST_GPU, _LONGEST_TYPE, _DIGEST = 20, 34, 8
"""Characters of the parts of a name; the number has three, of 63 together."""
_INVALID = expression(r"[^a-z0-9]+")


class Offer(Value):
    """A vGPU that can be created, as a device of its GPU's pool."""

    name: str
    type: VgpuType
    counters: dict[str, int]
    """What it takes from the counter set of its GPU."""
    groups: tuple[str, ...] = ()
    """What all vGPUs of its GPU have in common, for an API server that stores groups."""


class Offers(Value):
    """The counters of a GPU, and the vGPUs that can be created on it."""

    counters: dict[str, int]
    offers: tuple[Offer, ...] = ()


class Share(Value, dict=True):
    """A GPU, and what claims have of it."""

    gpu: Gpu
    claimed: dict[str, tuple[VgpuType, int]]
    """Allocated devices by name: type and number."""
    own: dict[str, str]
    """The device of each vGPU that was created for a claim and is counted by the scheduler."""
    labels: dict[str, str]
    """The label of each type by its ID."""

    @cached_property
    def foreign(self) -> tuple[Vgpu, ...]:
        """The active vGPUs that no allocated device stands for."""
        return tuple(vgpu for vgpu in self.gpu.instances if vgpu.name not in self.own)

    @cached_property
    def functions(self) -> int:
        """How many vGPUs claims can have by the number of functions, or of vGPUs."""
        if not self.gpu.is_divided:
            return max(0, self._most_at_once - len(self.foreign))
        lost = self.gpu.closed | self.gpu.wedged
        lost -= {vgpu.parent for vgpu in self.gpu.instances if vgpu.name in self.own}
        lost |= {vgpu.parent for vgpu in self.foreign}
        return sum(parent.name not in lost for parent in self.gpu.parents)

    @cached_property
    def _most_at_once(self) -> int:
        if self.gpu.is_divided:
            return len(self.gpu.parents)
        active = len(self.gpu.instances)
        return max((_offered(self.gpu, kind, active) for kind in self.gpu.types), default=active)

    def most(self, kind: VgpuType) -> int:
        """How many vGPUs of a type fit on the GPU when it is empty."""
        size, memory = kind.framebuffer, self.gpu.framebuffer
        if kind.max_instances is not None:
            limit = kind.max_instances
        elif size and memory is not None:
            limit = memory // size
        else:
            active = sum(vgpu.type == kind.id for vgpu in self.gpu.instances)
            limit = _offered(self.gpu, kind, active)
        return min(limit, self._most_at_once)

    def name(self, kind: VgpuType, number: int) -> str:
        """`gpu-0000-41-00-0-a40-4q-0`."""
        return f"{gpu_label(self.gpu.name)}-{self.labels[kind.id]}-{number}"


def share(gpu: Gpu, allocated: AbstractSet[str], created: Mapping[str, str]) -> Share:
    """A GPU with the devices of its pool that claims have, and the vGPUs created for them."""
    prefix = gpu_label(gpu.name) + "-"
    labels = _labels(gpu)
    for vgpu in gpu.instances:
        name = created.get(vgpu.name, "")
        # NVIDIA's driver names only types of which another vGPU fits, see creatable_vgpu_types.
        if vgpu.type_name is None and name in allocated and name.startswith(prefix):
            labels[vgpu.type] = name.removeprefix(prefix).rpartition("-")[0]
    kinds = {labels[kind.id]: kind for kind in gpu.types}
    claimed = {}
    for name in sorted(allocated):
        label, _, number = name.removeprefix(prefix).rpartition("-")
        if name.startswith(prefix) and label in kinds and number.isdecimal():
            claimed[name] = (kinds[label], int(number))
    own: dict[str, str] = {}
    for vgpu in gpu.instances:
        name = created.get(vgpu.name, "")
        known = claimed.get(name)
        if known is not None and known[0].id == vgpu.type and name not in own.values():
            own[vgpu.name] = name
    return Share(gpu, claimed, own, labels)


def offers_by_sums(shared: Share, *, has_groups: bool = False) -> Offers:
    """The vGPUs of a GPU without GPU instances, with memory and functions as counters.

    With compatibility groups, all sizes are offered at once, whatever claims have.
    """
    counters = _counters(shared)
    gpu = shared.gpu
    if has_groups and _can_group(gpu):
        return Offers(counters, tuple(_in_groups(shared, counters)))
    # While there are vGPUs, a driver does not report types that fit only without them.
    kinds = [kind for kind in _plain_types(gpu) if gpu.instances or room(gpu, kind).more > 0]
    numbered = list(shared.claimed.values())
    if not _adds_up(gpu):
        sizes = _sizes(shared)
        if not sizes:
            alone = (Offer(shared.name(kind, 0), kind, counters) for kind in kinds)
            return Offers(counters, tuple(alone) if shared.functions else ())
        kinds = [kind for kind in kinds if sizes == {_size(gpu, kind)}]
    numbered += [(kind, number) for kind in kinds for number in _numbers(shared, kind)]
    order = {kind.id: place for place, kind in enumerate(gpu.types)}
    numbered.sort(key=lambda item: (order[item[0].id], item[1]))
    offers = (Offer(shared.name(*item), item[0], _taken(counters, item[0])) for item in numbered)
    return Offers(counters, tuple(offers))


def _can_group(gpu: Gpu) -> bool:
    """Whether all vGPUs have one size, and how many fit of each is known when there are none."""
    is_known = gpu.framebuffer is not None and all(k.max_instances for k in _plain_types(gpu))
    return is_known and not _adds_up(gpu)


def _in_groups(shared: Share, counters: Mapping[str, int]) -> Iterator[Offer]:
    """All vGPUs that fit on the empty GPU; of others' vGPUs, only those of their size."""
    gpu = shared.gpu
    sizes = {_size(gpu, gpu.type_of(vgpu)) for vgpu in shared.foreign}
    for kind in _plain_types(gpu):
        group = (_group(gpu, kind),)
        offered = set(_numbers(shared, kind)) if sizes <= {_size(gpu, kind)} else set()
        claimed = {number for known, number in shared.claimed.values() if known.id == kind.id}
        for number in sorted(offered | claimed):
            yield Offer(shared.name(kind, number), kind, _taken(counters, kind), group)


def _group(gpu: Gpu, kind: VgpuType) -> str:
    """`size-4096`, or `type-nvidia-558` where a GPU has vGPUs of one type only."""
    size = _size(gpu, kind)
    return f"size-{size}" if isinstance(size, int) else f"type-{_label(kind.id, _LONGEST_TYPE)}"


def gpu_label(name: str) -> str:
    """`gpu-0000-41-00-0`."""
    return f"gpu-{_label(name, _LONGEST_GPU)}"


def _label(text: str, longest: int) -> str:
    """A text as a DNS label."""
    label = _INVALID.sub("-", text.lower()).strip("-")
    if len(label) <= longest:
        return label
    digest = sha256(text.encode()).hexdigest()[:_DIGEST]
    return f"{label[: longest - _DIGEST - 1].rstrip('-')}-{digest}"


def _labels(gpu: Gpu) -> dict[str, str]:
    """The label of each type by its ID; types of the same name also have their number."""
    plain = {kind.id: _label(kind.short_name or kind.id, _LONGEST_TYPE) for kind in gpu.types}
    found = list(plain.values())
    return {
        kind.id: plain[kind.id]
        if found.count(plain[kind.id]) == 1
        else _label(f"{kind.short_name or kind.id} {kind.number}", _LONGEST_TYPE)
        for kind in gpu.types
    }


def _offered(gpu: Gpu, kind: VgpuType, active: int) -> int:
    """How many vGPUs of a type fit by its own maximum; if it is unknown, one more at a time.

    A virtual function offers one, and all of them offer a type as long as one more fits.
    """
    if kind.max_instances is not None:
        return kind.max_instances
    return active + max((parent.offers(kind.id) or 0 for parent in gpu.parents), default=0)


def _counters(shared: Share) -> dict[str, int]:
    """The counters of a GPU; without a known memory, virtual functions for one more vGPU."""
    counters = {FUNCTIONS: shared.functions}
    if shared.gpu.framebuffer is None:
        if shared.gpu.is_divided:
            counters[FUNCTIONS] = min(shared.functions, len(shared.own) + 1)
    else:
        sizes = [_memory(shared.gpu.type_of(vgpu)) for vgpu in shared.foreign]
        is_known = None not in sizes or not _adds_up(shared.gpu)
        left = shared.gpu.framebuffer * MIB - sum(size or 0 for size in sizes)
        counters[MEMORY] = max(0, left) if is_known else 0
    return counters


def _memory(kind: VgpuType | None) -> int | None:
    return None if kind is None or kind.framebuffer is None else kind.framebuffer * MIB


def _taken(counters: Mapping[str, int], kind: VgpuType) -> dict[str, int]:
    size = _memory(kind)
    memory = {MEMORY: size} if size is not None and MEMORY in counters else {}
    return {FUNCTIONS: 1, **memory}


def _plain_types(gpu: Gpu) -> list[VgpuType]:
    """The types that need no GPU instance; none while the GPU is in MIG mode."""
    active = [gpu.type_of(vgpu) for vgpu in gpu.instances]
    if (gpu.mode is not None and gpu.mode.mig) or any(map(_needs_instance, active)):
        return []
    return [kind for kind in gpu.types if not _needs_instance(kind)]


def _needs_instance(kind: VgpuType | None) -> bool:
    if kind is None:
        return False
    return kind.instance_profile is not None or lives_in_gpu_instance(kind.name or "")


def _adds_up(gpu: Gpu) -> bool:
    """Whether vGPUs of several types fit together as long as their memory does."""
    is_known = gpu.framebuffer is not None and all(kind.framebuffer for kind in gpu.types)
    return is_known and not gpu.has_one_size


def _size(gpu: Gpu, kind: VgpuType | None) -> int | str | None:
    """What all vGPUs of a GPU must have in common: their size, or their type."""
    if kind is None:
        return None
    is_size = gpu.has_one_size and kind.framebuffer is not None
    return kind.framebuffer if is_size else kind.id


def _sizes(shared: Share) -> set[int | str | None]:
    """The sizes of the vGPUs that are active or claimed; usually one."""
    active = (shared.gpu.type_of(vgpu) for vgpu in shared.gpu.instances)
    claimed = (kind for kind, _ in shared.claimed.values())
    return {_size(shared.gpu, kind) for kind in (*active, *claimed)}


def _numbers(shared: Share, kind: VgpuType) -> Iterator[int]:
    """The numbers of more devices of a type, so many as fit beside the claimed and the others."""
    claimed = {number for known, number in shared.claimed.values() if known.id == kind.id}
    most = shared.most(kind)
    left = most - len(claimed) - sum(vgpu.type == kind.id for vgpu in shared.foreign)
    open_numbers = (number for number in range(most) if number not in claimed)
    return islice(open_numbers, max(0, left))
