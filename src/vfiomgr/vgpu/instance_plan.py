"""Plans for GPU instances (MIG): those that new vGPUs need, and which cannot be moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker, refusal, refuse
from vfiomgr.engine.plan import Plan, Step
from vfiomgr.vgpu.capacity import Gpu, gpus, instance_users, vgpus_inside
from vfiomgr.vgpu.instance_model import InstancePlace, counted_places
from vfiomgr.vgpu.instances import lacking, lay_out
from vfiomgr.vgpu.model import Vgpu
from vfiomgr.vgpu.steps import CreateMdev, SetGpuInstances, SetVgpuType

if TYPE_CHECKING:
    from vfiomgr.errors import Refusal
    from vfiomgr.pci.model import DeviceIdentity, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.instance_model import GpuInstance, GpuPartition
    from vfiomgr.vgpu.model import VgpuType


def needed_instances(host: HostSnapshot, steps: Sequence[Step]) -> tuple[SetGpuInstances, ...]:
    """Return the steps that create the GPU instances which new vGPUs need.

    Raises:
        Refusal: they do not fit beside the existing ones.
    """
    found: list[SetGpuInstances] = []
    for gpu in gpus(host):
        if gpu.partition is None or gpu.device is None:
            continue
        missing = lacking(gpu, _types_made_on(gpu, steps))
        if missing:
            found.append(_addition(gpu.device.identity, gpu.partition, missing))
    return tuple(found)


def instance_notes(steps: Iterable[SetGpuInstances]) -> Iterator[str]:
    """Return the notes about GPU instances that a plan creates."""
    for step in steps:
        yield (
            f"{step.device.address}: also creating GPU instances {counted_places(step.made)}; "
            f"remove them with: vfiomgr vgpu instances {step.device.address} --none"
        )


def missing_instances(host: HostSnapshot, device: PciDevice, names: Sequence[str]) -> Plan:
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
    return Plan(plan.summary, (_addition(device.identity, partition, missing),) if missing else ())


def exchange_instances(
    host: HostSnapshot, device: PciDevice, after: tuple[InstancePlace, ...]
) -> tuple[SetGpuInstances, ...]:
    """Return the step that replaces the GPU instances of a GPU."""
    partition = host.vgpus.partition_of(str(device.address))
    before = partition.places if partition is not None else ()
    if set(before) == set(after):
        return ()
    return (SetGpuInstances(device.identity, before, after),)


def present_instances(host: HostSnapshot, device: PciDevice) -> tuple[InstancePlace, ...]:
    """The GPU instances of a GPU, as reported by nvidia-smi."""
    partition = host.vgpus.partition_of(str(device.address))
    return () if partition is None else partition.places


def unmovable_instances(
    host: HostSnapshot, device: PciDevice, instances: Iterable[GpuInstance] | None = None
) -> Iterator[Diagnostic]:
    """Return why GPU instances (default: all) cannot be destroyed or restored."""
    partition = host.vgpus.partition_of(str(device.address))
    if partition is None:
        return
    for instance in partition.instances if instances is None else instances:
        held = instance_users(host, device, instance)
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


def _release(host: HostSnapshot, device: PciDevice, instance: GpuInstance) -> str:
    """Return the remedy for a GPU instance in use."""
    names = " ".join(vgpu.name for vgpu in vgpus_inside(host, device, instance))
    parts = [f"remove its vGPUs first: vfiomgr vgpu remove {names}"] if names else []
    parts += ["stop its processes first"] if instance.processes else []
    return ", and ".join(parts)


def vgpu_made_by(step: object) -> Vgpu | None:
    """The vGPU that a step creates; only what the step says is known."""
    unknown = (None, None, None, None, None)
    match step:
        case CreateMdev():
            return Vgpu(step.uuid, "mdev", step.parent, step.type_id, *unknown)
        case SetVgpuType() if step.after:
            address, kind = str(step.device.address), str(step.after)
            return Vgpu(None, "vendor-vfio", address, kind, *unknown)
        case _:
            return None


def _types_made_on(gpu: Gpu, steps: Sequence[Step]) -> Iterator[VgpuType]:
    """The types of the vGPUs that steps create on a GPU."""
    kinds = {kind.id: kind for kind in gpu.types}
    parents = {parent.name for parent in gpu.parents}
    for vgpu in filter(None, map(vgpu_made_by, steps)):
        if vgpu.parent in parents and vgpu.type in kinds:
            yield kinds[vgpu.type]


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
    there = counted_places(partition.places)
    message = (
        f"cannot create GPU instances {wanted} on {device.address}: no capacity beside {there}"
    )
    remedy = f"replace them: vfiomgr vgpu instances {device.address} PROFILE=COUNT"
    return refusal([blocker("gpu-instances-do-not-fit", device, message, remedy)])
