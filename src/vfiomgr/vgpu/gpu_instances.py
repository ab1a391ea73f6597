"""GPU instances (MIG) in other plans: created for vGPUs, kept, destroyed and restored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker, refusal, refuse
from vfiomgr.engine.plan import Plan
from vfiomgr.vgpu.capacity import gpus
from vfiomgr.vgpu.mig.placement import lacking, lay_out, occupants
from vfiomgr.vgpu.mig.steps import SetGpuInstances
from vfiomgr.vgpu.model import InstancePlace, counted
from vfiomgr.vgpu.steps import CreateMdev, SetVgpuType

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from vfiomgr.engine.plan import Step
    from vfiomgr.errors import Refusal
    from vfiomgr.pci.model import DeviceIdentity, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.capacity import Gpu
    from vfiomgr.vgpu.model import GpuInstance, GpuPartition, Vgpu, VgpuType


def needed(host: HostSnapshot, steps: Sequence[Step]) -> tuple[SetGpuInstances, ...]:
    """Return the steps that create the GPU instances which new vGPUs need.

    Raises:
        Refusal: they do not fit beside the existing ones.

    """
    found: list[SetGpuInstances] = []
    for gpu in gpus(host):
        if gpu.partition is None or gpu.device is None:
            continue
        missing = lacking(gpu, _made_on(gpu, steps))
        if missing:
            found.append(_addition(gpu.device.identity, gpu.partition, missing))
    return tuple(found)


def notes(steps: Iterable[SetGpuInstances]) -> Iterator[str]:
    """Return the notes about GPU instances that a plan creates."""
    for step in steps:
        yield (
            f"{step.device.address}: also creating GPU instances {counted(step.made)}; remove them "
            f"with: vfiomgr vgpu instances {step.device.address} --none"
        )


def completion(host: HostSnapshot, device: PciDevice, names: Sequence[str]) -> Plan:
    """Plan missing GPU instances of these profiles; others are kept.

    Raises:
        Refusal: they do not fit, or the GPU has no such profile.

    """
    plan = Plan(f"set GPU instances of {device}", ())
    partition = host.vgpus.partition_of(str(device.address))
    if not names or partition is None:
        return plan
    missing: dict[int, int] = {}
    for name in dict.fromkeys(names):
        profile = partition.called(name)
        if profile is None:
            message = f"GPU instance profile not found on {device}: {name}"
            refuse(
                "no-gpu-instance-profile",
                device,
                message,
                f"use one of: {', '.join(p.name for p in partition.profiles)}",
            )
        there = sum(one.profile == profile.id for one in partition.instances)
        if names.count(name) > there:
            missing[profile.id] = names.count(name) - there
    return Plan(
        plan.summary,
        (_addition(device.identity, partition, missing),) if missing else (),
    )


def exchange(
    host: HostSnapshot, device: PciDevice, after: tuple[InstancePlace, ...]
) -> tuple[SetGpuInstances, ...]:
    """Return the step that replaces the GPU instances of a GPU."""
    partition = host.vgpus.partition_of(str(device.address))
    before = partition.places if partition is not None else ()
    if set(before) == set(after):
        return ()
    return (SetGpuInstances(device.identity, before, after),)


def places(host: HostSnapshot, device: PciDevice) -> tuple[InstancePlace, ...]:
    """The GPU instances of a GPU, as reported by nvidia-smi."""
    partition = host.vgpus.partition_of(str(device.address))
    return () if partition is None else partition.places


def unmovable(
    host: HostSnapshot, device: PciDevice, instances: Iterable[GpuInstance] | None = None
) -> Iterator[Diagnostic]:
    """Return why GPU instances (default: all) cannot be destroyed or restored."""
    partition = host.vgpus.partition_of(str(device.address))
    if partition is None:
        return
    for instance in partition.instances if instances is None else instances:
        held = users(host, device, instance)
        if held:
            yield blocker(
                "gpu-instance-in-use",
                instance,
                f"{instance} of {device} is in use by: {', '.join(held)}",
                _release(host, device, instance),
            )
        elif not instance.is_whole:
            parts = ", ".join(instance.compute_instances)
            where = f"-gi {instance.id} -i {device.address}"
            yield blocker(
                "gpu-instance-divided",
                instance,
                f"{instance} of {device} has compute instances that a rollback cannot restore: "
                f"{parts}",
                f"destroy them first: nvidia-smi mig -dci {where}",
            )


def users(host: HostSnapshot, device: PciDevice, instance: GpuInstance) -> list[str]:
    """The vGPUs and processes that use a GPU instance."""
    inside = _inside(host, device, instance)
    told = [str(v) if v.gpu_instance is not None else f"{v} (possibly)" for v in inside]
    return [*told, *instance.processes]


def _release(host: HostSnapshot, device: PciDevice, instance: GpuInstance) -> str:
    """Return the remedy for a GPU instance in use."""
    names = " ".join(vgpu.name for vgpu in _inside(host, device, instance))
    parts = [f"remove its vGPUs first: vfiomgr vgpu remove {names}"] if names else []
    parts += ["stop its processes first"] if instance.processes else []
    return ", and ".join(parts)


def _inside(host: HostSnapshot, device: PciDevice, instance: GpuInstance) -> list[Vgpu]:
    name = str(device.address)
    gpu = next((known for known in gpus(host) if known.name == name), None)
    return occupants(gpu, instance) if gpu is not None else []


def _made_on(gpu: Gpu, steps: Sequence[Step]) -> Iterator[VgpuType]:
    """The types of the vGPUs that steps create on a GPU."""
    kinds = {kind.id: kind for kind in gpu.types}
    parents = {parent.name for parent in gpu.parents}
    for step in steps:
        match step:
            case CreateMdev(parent=parent, type_id=type_id) if parent in parents:
                made = kinds.get(type_id)
            case SetVgpuType() if step.after and str(step.device.address) in parents:
                made = kinds.get(str(step.after))
            case _:
                made = None
        if made is not None:
            yield made


def _addition(
    device: DeviceIdentity, partition: GpuPartition, missing: Mapping[int, int]
) -> SetGpuInstances:
    """Return the step that adds GPU instances, within the driver's own limits."""
    free = {profile.id: profile.free for profile in partition.profiles}
    after = None
    if all(count <= free.get(number, 0) for number, count in missing.items()):
        after = lay_out(partition, missing, partition.instances)
    if after is None:
        raise _no_room(device, partition, missing)
    return SetGpuInstances(device, partition.places, (*partition.places, *after))


def _no_room(
    device: DeviceIdentity, partition: GpuPartition, missing: Mapping[int, int]
) -> Refusal:
    known = {profile.id: profile.name for profile in partition.profiles}
    wanted = ", ".join(
        f"{count} x {known.get(number, number)}" for number, count in missing.items()
    )
    there = counted(partition.places)
    message = (
        f"cannot create GPU instances {wanted} on {device.address}: no capacity beside {there}"
    )
    remedy = f"replace them: vfiomgr vgpu instances {device.address} PROFILE=COUNT"
    return refusal([blocker("gpu-instances-do-not-fit", device, message, remedy)])
