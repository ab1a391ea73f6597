"""Modes of NVIDIA's GPUs: vGPUs of different sizes on one, and MIG."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, Option, Remedy, blocker, refuse_if_any
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.registry import plans, resolves
from vfiomgr.gpu.requests import GpuModeCheckpoint, SetGpuMode
from vfiomgr.passthrough import guards
from vfiomgr.sriov import plan as sriov_plan
from vfiomgr.sriov.requests import FunctionsCheckpoint, SetVirtualFunctions
from vfiomgr.vgpu import gpu_instances
from vfiomgr.vgpu.mig.steps import SetHeterogeneous, SetMig
from vfiomgr.vgpu.projection import with_functions, with_mode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.engine.step import Step
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import GpuMode, Vgpu


@plans(SetGpuMode)
def plan_mode(
    host: HostSnapshot, request: SetGpuMode, checkpoint: GpuModeCheckpoint | None = None
) -> Plan:
    """Bring a GPU into modes; its virtual functions are made anew around a change of MIG.

    Raises:
        Refusal: a vGPU is there, or the GPU has no such mode.
        UnknownDevice: the address names nothing.

    """
    device = host.device(request.address)
    refuse_if_any([*guards.stuck(host, device), *silent(host, device)], frozenset())
    mode = host.gpu_mode(device)
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
        refuse_if_any(_unmixable(device, mode_then, functions, mixed=mixed), frozenset())
        steps.append(SetHeterogeneous(device.identity, before=is_mixed, after=mixed))
    if steps:
        refuse_if_any(_carrying(host, device), frozenset())
    return Plan(
        summary=f"set the mode of {device.address}: {_words(request)}",
        steps=tuple(steps),
        locks=gpu_locks(host, device),
        already=() if steps else (f"{device} is in this mode already",),
        resolves=(str(device.address),),
    )


@resolves(SetGpuMode)
def resolve(
    host: HostSnapshot, request: SetGpuMode, checkpoint: GpuModeCheckpoint | None = None
) -> GpuModeCheckpoint:
    """Find the number of virtual functions, which come and go around a change of MIG."""
    return checkpoint or GpuModeCheckpoint(host.device(request.address).sriov_numvfs or 0)


def vgpus_on(host: HostSnapshot, device: PciDevice) -> list[Vgpu]:
    """The vGPUs of a GPU: its own, and those of its virtual functions."""
    names = (str(device.address), *map(str, device.virtual_functions))
    return [vgpu for name in names for vgpu in host.vgpus_of(name)]


def unmixable(device: PciDevice, mode: GpuMode | None) -> Iterator[Diagnostic]:
    """Why vGPUs of different sizes cannot be on a GPU."""
    if mode is not None and mode.mixes_sizes is False:
        yield blocker(
            "no-heterogeneous-mode",
            device,
            f"{device} carries vGPUs of one size only: nvidia-smi -q says Not Supported",
            Remedy(
                "",
                Option("not-heterogeneous", "leave out --heterogeneous"),
                "; with MIG, each GPU instance has a size of its own",
            ),
        )
    if mode is not None and mode.mig:
        yield blocker(
            "mig-mode",
            device,
            f"{device} is in MIG mode, where each GPU instance has vGPUs of one size",
            f"switch MIG off first: vfiomgr vgpu mode {device.address} --no-mig",
        )


def _mig_steps(
    host: HostSnapshot, device: PciDevice, mode: GpuMode, request: SetGpuMode
) -> tuple[list[Step], HostSnapshot]:
    """MIG, while there is no virtual function, and the host as it will be then."""
    steps: list[Step] = []
    if request.mig is None or request.mig is mode.mig:
        return steps, host
    refuse_if_any(_no_mig(device, mode), frozenset())
    if device.sriov_numvfs:
        refuse_if_any(_carrying(host, device), frozenset())
        none = SetVirtualFunctions(device.address, 0)
        steps += sriov_plan.plan_set(host, none, FunctionsCheckpoint(instances=())).steps
        host = with_functions(host, device, 0)
    else:
        refuse_if_any(gpu_instances.unmovable(host, device), frozenset())
        steps += gpu_instances.exchange(host, device, ())
    steps.append(SetMig(device.identity, before=mode.mig is True, after=request.mig))
    return steps, with_mode(host, replace(mode, mig=request.mig, heterogeneous=False))


def silent(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """GPUs of whose modes nothing is known."""
    if device.physical_function is not None:
        yield blocker(
            "not-a-gpu",
            device,
            f"{device} is a virtual function, and has the modes of its GPU",
            f"name that one: {device.physical_function}",
        )
    elif device.driver != "nvidia":
        driver = device.driver or "no driver"
        yield blocker(
            "not-on-nvidia",
            device,
            f"{device} is on {driver}: only NVIDIA's driver knows these modes",
            f"vfiomgr unbind {device.address} gives it back"
            if device.is_on_vfio
            else "name a GPU that is on the driver nvidia",
        )
    elif host.gpu_mode(device) is None:
        yield blocker(
            "nvidia-smi-silent",
            device,
            f"nvidia-smi tells nothing of {device}",
            "is it installed, and does nvidia-smi -q work? run it by hand to see why",
        )


def _carrying(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """A mode is set only while there is no vGPU (nvidia-smi ends with 19 otherwise)."""
    names = [vgpu.name for vgpu in vgpus_on(host, device)]
    if names:
        yield blocker(
            "carries-vgpus",
            device,
            f"{device} carries vGPUs, and changes its mode only without: {', '.join(names)}",
            f"remove them first: vfiomgr vgpu remove {' '.join(names)}",
        )


def _no_mig(device: PciDevice, mode: GpuMode) -> Iterator[Diagnostic]:
    if mode.mig is None:
        yield blocker(
            "no-mig",
            device,
            f"{device} has no MIG: nvidia-smi -q shows N/A",
            Remedy(
                "vGPUs of different sizes go together ",
                Option("heterogeneous", "with --heterogeneous"),
                ", where the GPU can do that",
            ),
        )


def _unmixable(
    device: PciDevice, mode: GpuMode, functions: int, *, mixed: bool
) -> Iterator[Diagnostic]:
    if mixed:
        yield from unmixable(device, mode)
    if device.sriov_totalvfs and not functions:
        yield blocker(
            "no-virtual-functions",
            device,
            f"{device} has no virtual functions, and forgets this mode when they are made",
            f"vfiomgr vgpu switch {device.address} vgpu{' --heterogeneous' * mixed} does both",
        )


def _words(request: SetGpuMode) -> str:
    words = {True: "heterogeneous", False: "homogeneous"}.get(request.heterogeneous or False)
    parts = [words] if words and request.heterogeneous is not None else []
    parts += [f"MIG {'on' if request.mig else 'off'}"] if request.mig is not None else []
    return ", ".join(parts)


def gpu_locks(host: HostSnapshot, device: PciDevice) -> tuple[str, ...]:
    """Those of a GPU, and of all its virtual functions."""
    functions = (d for d in host.devices if d.address in device.virtual_functions)
    return tuple(sorted({device_lock(device), *map(device_lock, functions)}))
