"""Plans for the GPU instances of a GPU in MIG mode: only differences change, all or nothing."""

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
    """Set the exact GPU instances of a GPU; instances in use keep their placement.

    Raises:
        Refusal: they do not fit, a surplus instance is in use, or MIG is off.
        UnknownDevice: the address or profile is not found.

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
        summary=f"set GPU instances of {device.address}: {counted(tuple(after))}",
        steps=steps,
        locks=gpu_mode.gpu_locks(host, device),
        notes=tuple(_notes(host, device, after)) if steps else (),
        already=() if steps else (f"{device} already has {counted(tuple(after))}",),
        resolves=(str(device.address),),
    )


def _undivided(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    mode = host.gpu_mode(device)
    if mode is None or mode.mig is None:
        yield blocker(
            "no-mig",
            device,
            f"{device} does not support MIG (nvidia-smi -q: N/A)",
            "name a GPU with MIG; list them with: vfiomgr vgpu mode",
        )
    elif not mode.mig:
        yield blocker(
            "mig-mode",
            device,
            f"MIG is off on {device}; GPU instances require it",
            f"turn it on first: vfiomgr vgpu mode {device.address} --mig",
        )
    elif host.partition(str(device.address)) is None:
        yield blocker(
            "nvidia-smi-silent",
            device,
            f"nvidia-smi does not report the GPU instances of {device}",
            f"find the cause with: nvidia-smi mig -lgip -i {device.address}",
        )


def _profile(device: PciDevice, partition: GpuPartition, name: str) -> InstanceProfile:
    profile = partition.called(name)
    if profile is None:
        names = [known.name for known in partition.profiles]
        close = difflib.get_close_matches(name, names, n=1)
        message = f"GPU instance profile not found on {device}: {name} (use {', '.join(names)})"
        raise UnknownDevice(
            message,
            f"did you mean {close[0]}?"
            if close
            else "list the profiles with: vfiomgr vgpu instances",
        )
    return profile


def _fixed(
    host: HostSnapshot, device: PciDevice, partition: GpuPartition, wanted: Mapping[int, int]
) -> list[GpuInstance]:
    """Return the GPU instances in use, which stay in place.

    Raises:
        Refusal: more instances are in use than requested.

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
    beside = f" beside {', '.join(map(str, fixed))} (in use)" if fixed else ""
    most = ", ".join(f"{names[n].total} x {names[n].name}" for n in wanted)
    return blocker(
        "gpu-instances-do-not-fit",
        device,
        f"no room for {asked} on {device}{beside}",
        f"request fewer (maximum on an empty GPU: {most})",
    )


def _notes(host: HostSnapshot, device: PciDevice, after: Sequence[InstancePlace]) -> Iterator[str]:
    kept = next((known for known in host.defined.gpus if known.gpu.address == device.address), None)
    if kept is None or kept.mig is None:
        yield "GPU instances are lost at reboot; keep them with vGPUs: vfiomgr vgpu define"
    elif sorted(kept.mig) != sorted(place.name for place in after):
        yield (
            f"{kept.path} has other GPU instances for the next boot; to keep these: "
            f"vfiomgr vgpu define {kept.vgpus[0].address}"
        )
    if device.sriov_totalvfs and not device.sriov_numvfs:
        yield (
            f"vGPUs on {device.address} also need virtual functions: "
            f"vfiomgr sriov set {device.address} {device.sriov_totalvfs} (keeps the GPU instances)"
        )
