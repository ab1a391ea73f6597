"""Plans for the modes of NVIDIA GPUs and their GPU instances (MIG): only differences change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, Option, Remedy, blocker, refuse_if_any
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import Plan, Step
from vfiomgr.engine.registry import plans, resolves
from vfiomgr.errors import UnknownDevice
from vfiomgr.gpu.requests import GpuModeCheckpoint, SetGpuMode, SetMigInstances
from vfiomgr.passthrough import guards
from vfiomgr.sriov import plan as sriov_plan
from vfiomgr.sriov.steps import FunctionsCheckpoint, SetVirtualFunctions
from vfiomgr.vgpu.instance_model import counted_places
from vfiomgr.vgpu.instance_plan import exchange_instances, unmovable_instances
from vfiomgr.vgpu.instances import lay_out
from vfiomgr.vgpu.projection import with_functions, with_mode
from vfiomgr.vgpu.steps import SetHeterogeneous, SetMig

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.instance_model import (
        GpuInstance,
        GpuPartition,
        InstancePlace,
        InstanceProfile,
    )
    from vfiomgr.vgpu.model import GpuMode, Vgpu


@plans(SetGpuMode)
def plan_mode(
    host: HostSnapshot, request: SetGpuMode, checkpoint: GpuModeCheckpoint | None = None
) -> Plan:
    """Set the modes of a GPU; a change of MIG removes and recreates its virtual functions.

    Raises:
        Refusal: the GPU has vGPUs, or does not support the mode.
        UnknownDevice: the address is not found.
    """
    device = host.device(request.address)
    refuse_if_any([*guards.stuck(host, device), *silent(host, device)])
    mode = host.vgpus.mode_of(device)
    assert mode is not None  # noqa: S101 - refused above
    functions = resolve(host, request, checkpoint).functions
    has_mig = mode.mig if request.mig is None else request.mig
    steps, host_then = _mig_steps(host, device, mode, request)
    mode_then = replace(mode, mig=has_mig)
    device_then = host_then.device(device.address)
    mixed = request.heterogeneous
    if (device_then.sriov_numvfs or 0) != functions:
        again = SetVirtualFunctions(device.address, functions)
        plain = FunctionsCheckpoint(heterogeneous=False)
        steps += sriov_plan.plan_set(host_then, again, plain).steps
        mode_then = replace(mode_then, heterogeneous=False)
    is_mixed = mode_then.heterogeneous is True
    if mixed is not None and mixed is not is_mixed:
        refuse_if_any(_unmixable(device, mode_then, functions, mixed=mixed))
        steps.append(SetHeterogeneous(device.identity, before=is_mixed, after=mixed))
    if steps:
        refuse_if_any(_carrying(host, device))
    return Plan(
        summary=f"set the mode of {device.address}: {_words(request)}",
        steps=tuple(steps),
        locks=gpu_locks(host, device),
        already=() if steps else (f"{device} is already in this mode",),
        resolves=(str(device.address),),
    )


@resolves(SetGpuMode)
def resolve(
    host: HostSnapshot, request: SetGpuMode, checkpoint: GpuModeCheckpoint | None = None
) -> GpuModeCheckpoint:
    """Return the number of virtual functions, which a change of MIG removes and recreates."""
    return checkpoint or GpuModeCheckpoint(host.device(request.address).sriov_numvfs or 0)


def vgpus_on(host: HostSnapshot, device: PciDevice) -> list[Vgpu]:
    """The vGPUs of a GPU and of its virtual functions."""
    names = (str(device.address), *map(str, device.virtual_functions))
    return [vgpu for name in names for vgpu in host.vgpus.of(name)]


def unmixable(device: PciDevice, mode: GpuMode | None) -> Iterator[Diagnostic]:
    """Refuse vGPUs of different sizes on a GPU that does not support them."""
    if mode is not None and mode.mixes_sizes is False:
        yield blocker(
            "no-heterogeneous-mode",
            device,
            f"{device} supports only vGPUs of one size (nvidia-smi -q: Not Supported)",
            Remedy(
                "",
                Option("not-heterogeneous", "leave out --heterogeneous"),
                "; with MIG, each GPU instance has its own size",
            ),
        )
    if mode is not None and mode.mig:
        yield blocker(
            "mig-mode",
            device,
            f"{device} is in MIG mode, in which each GPU instance has vGPUs of one size",
            f"turn MIG off first: vfiomgr vgpu mode {device.address} --no-mig",
        )


def _mig_steps(
    host: HostSnapshot, device: PciDevice, mode: GpuMode, request: SetGpuMode
) -> tuple[list[Step], HostSnapshot]:
    """Return the steps of a MIG change, without virtual functions, and the resulting host."""
    steps: list[Step] = []
    if request.mig is None or request.mig is mode.mig:
        return steps, host
    refuse_if_any(_no_mig(device, mode))
    if device.sriov_numvfs:
        refuse_if_any(_carrying(host, device))
        none = SetVirtualFunctions(device.address, 0)
        steps += sriov_plan.plan_set(host, none, FunctionsCheckpoint(instances=())).steps
        host = with_functions(host, device, 0)
    else:
        refuse_if_any(unmovable_instances(host, device))
        steps += exchange_instances(host, device, ())
    steps.append(SetMig(device.identity, before=mode.mig is True, after=request.mig))
    return steps, with_mode(host, replace(mode, mig=request.mig, heterogeneous=False))


def silent(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse GPUs whose modes are unknown."""
    if device.physical_function is not None:
        yield blocker(
            "not-a-gpu",
            device,
            f"{device} is a virtual function; only its GPU has modes",
            f"name the GPU: {device.physical_function}",
        )
    elif device.driver != "nvidia":
        driver = device.driver or "no driver"
        yield blocker(
            "not-on-nvidia",
            device,
            f"{device} is on {driver}; these modes require the driver nvidia",
            f"vfiomgr unbind {device.address}"
            if device.is_on_vfio
            else "name a GPU that uses the driver nvidia",
        )
    elif host.vgpus.mode_of(device) is None:
        yield blocker(
            "nvidia-smi-silent",
            device,
            f"nvidia-smi does not report {device}",
            "check that nvidia-smi is installed and works: nvidia-smi -q",
        )


def _carrying(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse to change modes while a GPU has vGPUs (nvidia-smi would exit with 19)."""
    names = [vgpu.name for vgpu in vgpus_on(host, device)]
    if names:
        yield blocker(
            "carries-vgpus",
            device,
            f"cannot change the mode of {device}: it has active vGPUs: {', '.join(names)}",
            f"remove them first: vfiomgr vgpu remove {' '.join(names)}",
        )


def _no_mig(device: PciDevice, mode: GpuMode) -> Iterator[Diagnostic]:
    if mode.mig is None:
        yield blocker(
            "no-mig",
            device,
            f"{device} does not support MIG (nvidia-smi -q: N/A)",
            Remedy(
                "vGPUs of different sizes are possible ",
                Option("heterogeneous", "with --heterogeneous"),
                " if the GPU supports it",
            ),
        )


def _unmixable(
    device: PciDevice, mode: GpuMode, functions: int, *, mixed: bool
) -> Iterator[Diagnostic]:
    if mixed:
        yield from unmixable(device, mode)
    if device.sriov_totalvfs and not functions:
        command = f"vfiomgr vgpu mode {device.address} vgpu"
        if mixed:
            command = f"vfiomgr vgpu mode {device.address} vgpu --heterogeneous"
        yield blocker(
            "no-virtual-functions",
            device,
            f"{device} has no virtual functions; it loses this mode when they are created",
            f"set both: {command}",
        )


def _words(request: SetGpuMode) -> str:
    words = {True: "heterogeneous", False: "homogeneous"}.get(request.heterogeneous or False)
    parts = [words] if words and request.heterogeneous is not None else []
    parts += [f"MIG {'on' if request.mig else 'off'}"] if request.mig is not None else []
    return ", ".join(parts)


def gpu_locks(host: HostSnapshot, device: PciDevice) -> tuple[str, ...]:
    """The locks of a GPU and all its virtual functions."""
    functions = (d for d in host.devices if d.address in device.virtual_functions)
    return tuple(sorted({device_lock(device), *map(device_lock, functions)}))


@plans(SetMigInstances)
def plan_divide(host: HostSnapshot, request: SetMigInstances) -> Plan:
    """Set the exact GPU instances of a GPU; instances in use keep their placement.

    Raises:
        Refusal: they do not fit, a surplus instance is in use, or MIG is off.
        UnknownDevice: the address or profile is not found.
    """
    device = host.device(request.address)
    refuse_if_any([*guards.stuck(host, device), *silent(host, device)])
    refuse_if_any(_undivided(host, device))
    partition = host.vgpus.partition_of(str(device.address))
    assert partition is not None  # noqa: S101 - refused above
    wanted = {_profile(device, partition, name).id: count for name, count in request.instances}
    fixed = _fixed(host, device, partition, wanted)
    left = {n: c - sum(one.profile == n for one in fixed) for n, c in wanted.items()}
    more = lay_out(partition, {n: count for n, count in left.items() if count}, fixed)
    refuse_if_any([] if more is not None else [_no_room(device, wanted, partition, fixed)])
    after = sorted((*(one.place for one in fixed), *(more or ())), key=lambda place: place.start)
    going = [one for one in partition.instances if one.place not in after]
    refuse_if_any(unmovable_instances(host, device, going))
    steps = exchange_instances(host, device, tuple(after))
    return Plan(
        summary=f"set GPU instances of {device.address}: {counted_places(tuple(after))}",
        steps=steps,
        locks=gpu_locks(host, device),
        notes=tuple(_notes(host, device, after)) if steps else (),
        already=() if steps else (f"{device} already has {counted_places(tuple(after))}",),
        resolves=(str(device.address),),
    )


def _undivided(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    mode = host.vgpus.mode_of(device)
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
    elif host.vgpus.partition_of(str(device.address)) is None:
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
        import difflib  # noqa: PLC0415 - slow to import

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
        if next(unmovable_instances(host, device, [one]), None) is None:
            continue
        alike = sum(other.profile == one.profile for other in fixed)
        (fixed if alike < wanted.get(one.profile, 0) else surplus).append(one)
    refuse_if_any(unmovable_instances(host, device, surplus))
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
        f"no capacity for {asked} on {device}{beside}",
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
