"""Capacity of GPUs: how many more vGPUs of each type fit, and why others do not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from vfiomgr import units
from vfiomgr.diagnostic import Option, Remedy
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.pci.model import PciAddress, PciDevice
from vfiomgr.value import Value
from vfiomgr.vgpu.instance_model import GpuPartition, counted_places
from vfiomgr.vgpu.instances import more_of, seats
from vfiomgr.vgpu.model import GpuMode, Vgpu, VgpuParent, VgpuType, describe_type

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.instance_model import GpuInstance
    from vfiomgr.vgpu.model import Family


_VENDOR_DRIVER = "nvidia"
_IN_INSTANCE = expression(r"-\d+-\d+[A-Z]")
"""In names of types that need a GPU instance: `A100-1-5C`."""


class Capacity(Value):
    """How many more vGPUs of one type a GPU has room for."""

    type: VgpuType
    more: int
    """How many more can be created now; not the sum over the virtual functions."""
    is_certain: bool
    """Whether the driver reports everything that the number needs; if not, it is a maximum."""
    why_not: str | None
    """Why no more can be created."""
    stranded: int | None
    """MiB that remain unusable when the GPU is filled with this type."""
    makeable: int = 0
    """How many more would fit in new GPU instances (MIG)."""
    remedy: Remedy | None = None
    """The MIG mode that the type needs, if the GPU is in the other one."""

    @property
    def unavailable_because(self) -> str | None:
        """Why no more can be created, with the command that adds capacity, if there is one."""
        return self.why_not if self.remedy is None else f"{self.why_not}: {self.remedy}"


class Gpu(Value, dict=True):
    """A GPU, or another device that supports vGPUs, with its parents and vGPUs."""

    name: str
    device: PciDevice | None
    parents: tuple[VgpuParent, ...]
    instances: tuple[Vgpu, ...]
    mode: GpuMode | None
    closed: frozenset[str] = frozenset()
    """Virtual functions that cannot become a vGPU."""
    wedged: frozenset[str] = frozenset()
    """Virtual functions that rejected a type before; used only if they are named."""
    asked: str | None = None
    """The only parent to use, if one was named."""
    partition: GpuPartition | None = None
    """Its GPU instances in MIG mode, if nvidia-smi reports them."""

    @property
    def family(self) -> Family:
        """How its vGPUs are created."""
        return self.parents[0].family

    @property
    def numa_node(self) -> int | None:
        """The NUMA node of the GPU."""
        return self.device.numa_node if self.device else None

    @property
    def is_divided(self) -> bool:
        """Whether each vGPU has its own virtual function."""
        return any(parent.is_virtual_function for parent in self.parents)

    def __str__(self) -> str:
        """`0000:08:00.0 (NVIDIA A40)`."""
        return self.name if self.device is None else str(self.device)

    @cached_property
    def types(self) -> tuple[VgpuType, ...]:
        """All types of its parents and of its vGPUs, in order."""
        made = {vgpu.type: describe_type(vgpu.type, vgpu.type_name) for vgpu in self.instances}
        known = made | {kind.id: kind for parent in self.parents for kind in parent.types}
        return tuple(sorted(known.values(), key=by_number))

    @cached_property
    def free(self) -> tuple[VgpuParent, ...]:
        """The parents that could carry another vGPU."""
        taken = {vgpu.parent for vgpu in self.instances}
        return tuple(
            parent
            for parent in self.parents
            if parent.name not in self.closed
            and (parent.name not in self.wedged or parent.name == self.asked)
            and self.asked in (None, parent.name)
            and not (parent.is_virtual_function and parent.name in taken)
        )

    def type_of(self, vgpu: Vgpu) -> VgpuType | None:
        """The type of a vGPU; None if no parent lists it."""
        return next((kind for kind in self.types if kind.id == vgpu.type), None)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """MiB of each vGPU whose size is known."""
        kinds = map(self.type_of, self.instances)
        return tuple(k.framebuffer for k in kinds if k is not None and k.framebuffer is not None)

    @property
    def has_several_sizes(self) -> bool:
        """Whether its vGPUs may have different sizes, or have them."""
        return len(set(self.sizes)) > 1 or self.is_heterogeneous

    @property
    def is_heterogeneous(self) -> bool:
        """NVIDIA's mode, as nvidia-smi reports it or vGPUs of several sizes show it.

        vGPUs in GPU instances (MIG) have several sizes without it.
        """
        mode = self.mode
        if mode is not None and (mode.heterogeneous or mode.mig):
            return bool(mode.heterogeneous)
        kinds = [kind for kind in map(self.type_of, self.instances) if kind is not None]
        is_divided = any(_IN_INSTANCE.search(kind.name or "") for kind in kinds)
        return self._is_nvidia and not is_divided and len(set(self.sizes)) > 1

    @property
    def _is_nvidia(self) -> bool:
        return any(kind.series for kind in self.types)

    @property
    def has_one_size(self) -> bool:
        """Whether all its vGPUs must have the same size, as on NVIDIA GPUs by default."""
        is_free = self.has_several_sizes or bool(self.mode and self.mode.mig)
        return self._is_nvidia and not is_free

    @property
    def lock(self) -> int | None:
        """MiB that all vGPUs of an NVIDIA GPU must have, as its first one does."""
        return self.sizes[0] if self.sizes and self.has_one_size else None

    @cached_property
    def framebuffer(self) -> int | None:
        """MiB of the GPU, from nvidia-smi or implied by the types of a GPU without VFs."""
        if self.mode is not None and self.mode.framebuffer is not None:
            return self.mode.framebuffer
        sized = [kind for kind in self.types if kind.framebuffer]
        whole = [(k.framebuffer or 0) * k.max_instances for k in sized if k.max_instances]
        if not whole and not self.is_divided:
            left = [
                (k.framebuffer or 0) * (p.offers(k.id) or 0) for p in self.parents for k in sized
            ]
            whole = [max(left) + sum(self.sizes)] if left else []
        return max(whole) if whole else None


def gpus(host: HostSnapshot) -> tuple[Gpu, ...]:
    """All GPUs of a host that have parents, by name."""
    return host.once(_gpus)


def _gpus(host: HostSnapshot) -> tuple[Gpu, ...]:
    by_gpu: dict[str, list[VgpuParent]] = {}
    for parent in host.vgpus.parents:
        by_gpu.setdefault(parent.gpu, []).append(parent)
    modes = {mode.gpu: mode for mode in host.vgpus.modes}
    return tuple(
        Gpu(
            name=name,
            device=host.device_named(name),
            parents=tuple(sorted(parents, key=lambda parent: in_order(parent.name))),
            instances=tuple(v for parent in parents for v in host.vgpus.of(parent.name)),
            mode=modes.get(name),
            closed=frozenset(lost_functions(host, parents)),
            wedged=frozenset(one.name for one in host.vgpus.wedged),
            partition=host.vgpus.partition_of(name),
        )
        for name, parents in sorted(by_gpu.items(), key=lambda item: in_order(item[0]))
    )


def instance_users(host: HostSnapshot, device: PciDevice, instance: GpuInstance) -> list[str]:
    """The vGPUs and processes that use a GPU instance."""
    inside = vgpus_inside(host, device, instance)
    told = [str(v) if v.gpu_instance is not None else f"{v} (possibly)" for v in inside]
    return [*told, *instance.processes]


def vgpus_inside(host: HostSnapshot, device: PciDevice, instance: GpuInstance) -> list[Vgpu]:
    """The vGPUs that run in a GPU instance, and those that may."""
    name = str(device.address)
    gpu = next((known for known in gpus(host) if known.name == name), None)
    if gpu is None:
        return []
    return [vgpu for vgpu in gpu.instances if _may_live_in(gpu, vgpu, instance)]


def _may_live_in(gpu: Gpu, vgpu: Vgpu, instance: GpuInstance) -> bool:
    if vgpu.gpu_instance is not None:
        return vgpu.gpu_instance == instance.id
    kind = gpu.type_of(vgpu)
    return kind is None or kind.instance_profile in (None, instance.profile)


def lost_functions(host: HostSnapshot, parents: Iterable[VgpuParent]) -> dict[str, str]:
    """Return virtual functions that cannot become a vGPU, with the reason."""
    found: dict[str, str] = {}
    for parent in parents:
        device = host.device_named(parent.name)
        why = None if device is None else _why_lost(parent, device)
        if why is not None:
            found[parent.name] = why
    return found


def _why_lost(parent: VgpuParent, device: PciDevice) -> str | None:
    if device.stuck:
        return f"is stuck in the kernel: {device.stuck}"
    if not device.is_responsive:
        return "does not answer on the bus"
    if device.driver is None:
        return "lost its driver"
    if parent.family == "vendor-vfio" and device.driver != _VENDOR_DRIVER:
        return f"is on {device.driver}"
    return None


def totals(found: Iterable[Capacity]) -> tuple[Capacity, ...]:
    """Return the total capacity of all GPUs, for types that several GPUs have."""
    alike: dict[tuple[str, str | None], list[Capacity]] = {}
    for one in found:
        alike.setdefault((one.type.id, one.type.name), []).append(one)
    return tuple(
        Capacity(
            several[0].type,
            sum(one.more for one in several),
            all(one.is_certain for one in several),
            None if any(one.more for one in several) else "no GPU has capacity",
            None,
            sum(one.makeable for one in several),
        )
        for several in alike.values()
        if len(several) > 1
    )


def rooms(gpu: Gpu) -> tuple[Capacity, ...]:
    """Return the capacity of a GPU for each of its types."""
    return tuple(room(gpu, kind) for kind in gpu.types)


def room(gpu: Gpu, kind: VgpuType) -> Capacity:
    """Return the capacity of a GPU for one type."""
    if gpu.partition is not None and kind.instance_profile is not None:
        return _room_in_instances(gpu, gpu.partition, kind)
    offering, is_told = _offering(gpu, kind)
    limit = _limit(gpu, kind)
    used = _used(gpu, kind)
    if not gpu.is_divided:
        more = max((parent.offers(kind.id) or 0 for parent in offering), default=0)
        more = more if is_told else min(1, len(offering))
        is_certain = is_told
    else:
        more = len(offering) if limit is None else min(len(offering), max(0, limit - used))
        is_certain = is_told and limit is not None
    why_not = None
    if is_locked(gpu, kind):
        more, count = 0, len(gpu.instances)
        what = "its vGPU has" if count == 1 else f"its {count} vGPUs have"
        why_not = (
            f"size lock: {what} {gpu.lock} MiB, and all vGPUs of a GPU must have the same size"
        )
    elif not more:
        why_not = _why_at_limit(gpu, kind, limit, used)
    remedy = None
    if not more and why_not is None:
        why_not, remedy = _why_not_offered(gpu, kind), _other_mode(gpu, kind)
    stranded = None
    if more and gpu.framebuffer is not None and kind.framebuffer is not None:
        stranded = max(0, gpu.framebuffer - sum(gpu.sizes) - more * kind.framebuffer)
    return Capacity(kind, more, is_certain or not more, why_not, stranded, remedy=remedy)


def _room_in_instances(gpu: Gpu, partition: GpuPartition, kind: VgpuType) -> Capacity:
    """Return the capacity for a type that runs in existing or new GPU instances."""
    offering, is_told = _offering(gpu, kind)
    limit, used = _limit(gpu, kind), _used(gpu, kind)
    functions = len(gpu.free) if limit is None else min(len(gpu.free), max(0, limit - used))
    more = min(functions, seats(gpu, kind)) if offering or not is_told else 0
    profile = partition.profile(kind.instance_profile)
    made = more_of(partition, profile) if profile is not None and functions > more else 0
    makeable = min(made * (kind.per_instance or 1), functions - more)
    why_not = None
    if not more:
        why_not = _why_at_limit(gpu, kind, limit, used) or _why_not_offered(gpu, kind)
    if makeable and not more:
        why_not = f"no free GPU instance {profile} (MIG); vgpu create creates one"
    return Capacity(kind, more, is_certain=True, why_not=why_not, stranded=None, makeable=makeable)


def _offering(gpu: Gpu, kind: VgpuType) -> tuple[Sequence[VgpuParent], bool]:
    """Return the free parents that offer a type, and whether the driver reports it.

    If nothing is known of any of them (an incomplete recording), all free ones count.
    """
    told = [parent for parent in gpu.free if parent.offers(kind.id)]
    if told or any(parent.offers(kind.id) is not None and parent.types for parent in gpu.free):
        return told, True
    return [p for p in gpu.free if not p.types or p.offers(kind.id) is None], False


def _limit(gpu: Gpu, kind: VgpuType) -> int | None:
    """Return how many vGPUs of a type, or of its size, the memory of the GPU can carry."""
    if kind.max_instances is not None:
        return kind.max_instances
    if gpu.framebuffer is None or not kind.framebuffer or (gpu.mode and gpu.mode.mig):
        return None
    return gpu.framebuffer // kind.framebuffer


def _used(gpu: Gpu, kind: VgpuType) -> int:
    """Return how much of the limit is used, by number or by memory."""
    if kind.framebuffer is None or (gpu.mode is not None and gpu.mode.mig):
        return sum(vgpu.type == kind.id for vgpu in gpu.instances)
    taken = -(-sum(gpu.sizes) // kind.framebuffer)
    return max(taken, sum(vgpu.type == kind.id for vgpu in gpu.instances))


def is_locked(gpu: Gpu, kind: VgpuType) -> bool:
    """Whether the vGPUs of a GPU have another size than a type, and all must have the same."""
    return gpu.lock is not None and kind.framebuffer not in (None, gpu.lock)


def _why_at_limit(gpu: Gpu, kind: VgpuType, limit: int | None, used: int) -> str | None:
    """Return the limit that is reached: of vGPUs, memory or virtual functions."""
    if limit is not None and used >= limit and gpu.instances:
        alike = [v for v in gpu.instances if v.type == kind.id or not gpu.has_several_sizes]
        if kind.max_instances is not None and len(alike) >= kind.max_instances:
            return f"maximum reached: {len(alike)} of {kind.max_instances}"
        left = None if gpu.framebuffer is None else gpu.framebuffer - sum(gpu.sizes)
        if left is not None and left < (kind.framebuffer or 0):
            return f"not enough memory: {sum(gpu.sizes)} of {gpu.framebuffer} MiB used"
    if gpu.is_divided and not gpu.free:
        return why_none_is_free(gpu)
    return None


def _why_not_offered(gpu: Gpu, kind: VgpuType) -> str:
    why_not = _why_no_instance(gpu, kind)
    if why_not is None and gpu.instances:
        count = units.counted(len(gpu.instances), "active vGPU")
        why_not = f"the driver allows no more with {count}"
    return why_not or "the driver offers none now"


def _why_no_instance(gpu: Gpu, kind: VgpuType) -> str | None:
    """Return why MIG prevents a vGPU of this type."""
    number, partition = kind.instance_profile, gpu.partition
    if partition is None:
        if gpu.mode is None or not gpu.mode.mig:
            text = f"needs a GPU instance of profile {number}, but MIG is off"
            return None if number is None else text
        command = f"nvidia-smi mig -cgi {number} -C -i {gpu.name}"
        text = f"no free GPU instance of profile {number} (MIG); create one with: {command}"
        return "no free GPU instance of this size (MIG)" if number is None else text
    if number is None:
        needs_instances = any(other.instance_profile is not None for other in gpu.types)
        return "does not run in a GPU instance, but MIG is on" if needs_instances else None
    profile = partition.profile(number)
    if profile is None:
        return f"the GPU has no GPU instance profile {number}"
    return (
        f"no free GPU instance {profile} (MIG), and no capacity beside "
        f"{counted_places(partition.places)}: vfiomgr vgpu instances {gpu.name}"
    )


def _other_mode(gpu: Gpu, kind: VgpuType) -> Remedy | None:
    """The MIG mode to set for a type that is only offered in that mode."""
    needs_mig = kind.instance_profile is not None
    if gpu.partition is None and needs_mig and not (gpu.mode is not None and gpu.mode.mig):
        return Remedy("", Option("mig", f"vfiomgr vgpu mode {gpu.name} --mig"))
    if gpu.partition is not None and not needs_mig and _why_no_instance(gpu, kind):
        return Remedy("", Option("not-mig", f"vfiomgr vgpu mode {gpu.name} --no-mig"))
    return None


def why_none_is_free(gpu: Gpu) -> str:
    """Explain that all virtual functions of a GPU are used or lost."""
    taken = {vgpu.parent for vgpu in gpu.instances}
    if gpu.asked is not None:
        return f"{gpu.asked} {'is already a vGPU' if gpu.asked in taken else 'lost its driver'}"
    lost = len((gpu.closed | gpu.wedged) & {parent.name for parent in gpu.parents} - taken)
    return f"no free virtual function: {len(taken)} of {len(gpu.parents)} are vGPUs" + (
        f", {lost} without a driver or not responding" if lost else ""
    )


def by_number(kind: VgpuType) -> tuple[str, int, str]:
    """Sort key for types: by the driver's number, or by name."""
    number = int(kind.number) if kind.number.isdecimal() else 0
    return kind.id.removesuffix(kind.number), number, kind.id


@lru_cache(maxsize=1 << 14)
def in_order(name: str) -> tuple[int, PciAddress | str]:
    """Sort key for names: addresses as numbers first, then other names."""
    try:
        return 0, PciAddress.parse(name)
    except UsageError:
        return 1, name
