"""Dividing a GPU in MIG mode into GPU instances: as told, all or nothing, and only what differs."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker, refuse_if_any
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.registry import plans
from vfiomgr.errors import UnknownDevice
from vfiomgr.gpu import mode as gpu_mode
from vfiomgr.gpu.requests import SetMigInstances
from vfiomgr.passthrough import guards
from vfiomgr.vgpu import gpu_instances
from vfiomgr.vgpu.mig.model import counted
from vfiomgr.vgpu.mig.placement import lay_out

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.mig.model import GpuInstance, GpuPartition, InstancePlace, InstanceProfile


@plans(SetMigInstances)
def plan_divide(host: HostSnapshot, request: SetMigInstances) -> Plan:
    """Have so many GPU instances of each profile, and no others; those in use stay where they are.

    Raises:
        Refusal: they do not fit, one that has to go is in use, or MIG is off.
        UnknownDevice: the address names nothing, or the GPU has no such profile.

    """
    device = host.device(request.address)
    refuse_if_any([*guards.stuck(host, device), *gpu_mode.silent(host, device)], frozenset())
    refuse_if_any(_undivided(host, device), frozenset())
    partition = host.partition(str(device.address))
    assert partition is not None  # noqa: S101 - refused above
    wanted = {_profile(device, partition, name).id: count for name, count in request.instances}
    fixed = _fixed(host, device, partition, wanted)
    left = {n: c - sum(one.profile == n for one in fixed) for n, c in wanted.items()}
    more = lay_out(partition, {n: count for n, count in left.items() if count}, fixed)
    refuse_if_any(
        [] if more is not None else [_no_room(device, wanted, partition, fixed)], frozenset()
    )
    after = sorted((*(one.place for one in fixed), *(more or ())), key=lambda place: place.start)
    going = [one for one in partition.instances if one.place not in after]
    refuse_if_any(gpu_instances.unmovable(host, device, going), frozenset())
    steps = gpu_instances.exchange(host, device, tuple(after))
    return Plan(
        summary=f"divide {device.address} into GPU instances: {counted(tuple(after))}",
        steps=steps,
        locks=gpu_mode.gpu_locks(host, device),
        notes=tuple(_notes(host, device, after)) if steps else (),
        already=() if steps else (f"{device} is divided so already: {counted(tuple(after))}",),
        resolves=(str(device.address),),
    )


def _undivided(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    mode = host.gpu_mode(device)
    if mode is None or mode.mig is None:
        yield blocker(
            "no-mig",
            device,
            f"{device} has no MIG: nvidia-smi -q shows N/A",
            "name a GPU that has; vfiomgr vgpu mode shows which do",
        )
    elif not mode.mig:
        yield blocker(
            "mig-mode",
            device,
            f"MIG is off on {device}, and GPU instances are made only with it",
            f"switch it on first: vfiomgr vgpu mode {device.address} --mig",
        )
    elif host.partition(str(device.address)) is None:
        yield blocker(
            "nvidia-smi-silent",
            device,
            f"nvidia-smi tells nothing of the GPU instances of {device}",
            f"run it by hand to see why: nvidia-smi mig -lgip -i {device.address}",
        )


def _profile(device: PciDevice, partition: GpuPartition, name: str) -> InstanceProfile:
    profile = partition.called(name)
    if profile is None:
        names = [known.name for known in partition.profiles]
        close = difflib.get_close_matches(name, names, n=1)
        message = f"{device} has no GPU instance profile {name}; it has {', '.join(names)}"
        raise UnknownDevice(
            message,
            f"did you mean {close[0]}?" if close else "vfiomgr vgpu instances list shows them",
        )
    return profile


def _fixed(
    host: HostSnapshot, device: PciDevice, partition: GpuPartition, wanted: Mapping[int, int]
) -> list[GpuInstance]:
    """The GPU instances in use, which stay: there must not be more of them than are wanted.

    Raises:
        Refusal: which are too many, and who uses them.

    """
    fixed: list[GpuInstance] = []
    surplus: list[GpuInstance] = []
    for one in partition.instances:
        if next(gpu_instances.unmovable(host, device, [one]), None) is None:
            continue
        alike = sum(other.profile == one.profile for other in fixed)
        (fixed if alike < wanted.get(one.profile, 0) else surplus).append(one)
    refuse_if_any(gpu_instances.unmovable(host, device, surplus), frozenset())
    return fixed


def _no_room(
    device: PciDevice,
    wanted: Mapping[int, int],
    partition: GpuPartition,
    fixed: Sequence[GpuInstance],
) -> Diagnostic:
    names = {profile.id: profile for profile in partition.profiles}
    asked = ", ".join(f"{count} x {names[n].name}" for n, count in wanted.items() if count)
    beside = f" beside {', '.join(map(str, fixed))}, which stay" if fixed else ""
    most = ", ".join(f"{names[n].name} {names[n].total} at most" for n in wanted)
    return blocker(
        "gpu-instances-do-not-fit",
        device,
        f"{asked} do not fit together on {device}{beside}",
        f"ask for fewer: alone on the GPU there are of {most}",
    )


def _notes(host: HostSnapshot, device: PciDevice, after: Sequence[InstancePlace]) -> Iterator[str]:
    kept = next((known for known in host.defined.gpus if known.gpu.address == device.address), None)
    if kept is None or kept.mig is None:
        yield "GPU instances do not outlast a reboot: vfiomgr vgpu define keeps them with its vGPUs"
    elif sorted(kept.mig) != sorted(place.name for place in after):
        yield (
            f"{kept.path} keeps other GPU instances for the next boot: vfiomgr vgpu define "
            f"{kept.vgpus[0].address} keeps these"
        )
    if device.sriov_totalvfs and not device.sriov_numvfs:
        yield (
            f"for vGPUs {device.address} needs virtual functions too: "
            f"vfiomgr sriov set {device.address} {device.sriov_totalvfs} keeps the GPU instances"
        )
