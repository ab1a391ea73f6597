"""What virtual functions of the vendor's driver are to be, in the documents of their GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal, UnknownDevice, UsageError
from vfiomgr.model.definition import PARAMETERS
from vfiomgr.model.gpu_definition import (
    VERSION,
    FunctionDefinition,
    GpuDefinition,
    gpu_file,
    render_gpu_definition,
)
from vfiomgr.model.host_step import ReplaceFile
from vfiomgr.model.pci import PciAddress
from vfiomgr.model.vgpu import types_called
from vfiomgr.planner.vgpu_room import gpus

if TYPE_CHECKING:
    from vfiomgr.model.intent import DefineVgpu
    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.snapshot import HostSnapshot
    from vfiomgr.planner.vgpu_room import Gpu


def defined(host: HostSnapshot, intent: DefineVgpu) -> tuple[GpuDefinition | None, GpuDefinition]:
    """The definition of a GPU as it is, and with a virtual function as it is to be.

    Raises:
        UsageError: a part is missing, or is none of a virtual function.
        UnknownDevice: the GPU has no such type.
        Refusal: the present document is of another device, or cannot be read.

    """
    address = PciAddress.parse(intent.name)
    gpu = _gpu_of(host, address)
    device = _physical(host, gpu)
    old = _document(host, device)
    function = old.function(address) if old else None
    present = _present(gpu, device, old)
    return old, present.with_function(_wanted(host, intent, gpu, function))


def replacement(
    host: HostSnapshot, old: GpuDefinition | None, new: GpuDefinition | None
) -> ReplaceFile | None:
    """The step from one document to another; None where they are the same."""
    if old == new:
        return None
    path = old.path if old else new.path if new else ""
    after = render_gpu_definition(new) if new else None
    return ReplaceFile(path, host.defined.file(path), after)


def _gpu_of(host: HostSnapshot, address: PciAddress) -> Gpu:
    for gpu in gpus(host):
        if gpu.family == "vendor-vfio" and str(address) in {p.name for p in gpu.parents}:
            return gpu
    message = f"{address} is no virtual function that the vendor's driver makes a vGPU of"
    raise UnknownDevice(message, "vfiomgr vgpu types shows GPUs that make vGPUs")


def _physical(host: HostSnapshot, gpu: Gpu) -> PciDevice:
    if gpu.mode is not None and gpu.mode.mig and gpu.partition is None:
        message = f"{gpu} is divided by MIG, and nvidia-smi tells nothing of its GPU instances"
        raise Refusal(message, f"run it by hand to see why: nvidia-smi mig -lgip -i {gpu.name}")
    return host.device(PciAddress.parse(gpu.name))


def _document(host: HostSnapshot, device: PciDevice) -> GpuDefinition | None:
    path = gpu_file(device.address)
    for problem in host.vgpu_definition_problems:
        if problem.path == path:
            message = f"{path} is there, and defines nothing: {problem.reason}"
            raise Refusal(message, "mend it, or remove it")
    known = next((g for g in host.defined.gpus if g.gpu.address == device.address), None)
    if known is not None and not known.gpu.is_same_as(device.identity):
        message = f"{path} is about another device: {known.gpu}; there is {device.identity} now"
        raise Refusal(message, f"remove it, or undefine its vGPUs first: {_names(known)}")
    return known


def _names(known: GpuDefinition) -> str:
    return f"vfiomgr vgpu undefine {' '.join(str(f.address) for f in known.vgpus)}"


def _present(gpu: Gpu, device: PciDevice, old: GpuDefinition | None) -> GpuDefinition:
    """A GPU as it is now, and with the vGPUs that are defined."""
    base = old or GpuDefinition(VERSION, device.identity, 0, ())
    mode = gpu.mode.heterogeneous if gpu.mode else None
    return replace(
        base,
        virtual_functions=device.sriov_numvfs or len(device.virtual_functions),
        heterogeneous=base.heterogeneous if mode is None else mode,
        mig=_instances(gpu, base),
    )


def _instances(gpu: Gpu, base: GpuDefinition) -> tuple[str, ...] | None:
    """The profiles of the GPU instances that are there; as they were kept where MIG is unknown."""
    if gpu.mode is None or gpu.mode.mig is None:
        return base.mig
    if not gpu.mode.mig:
        return None
    return tuple(place.name for place in gpu.partition.places) if gpu.partition else base.mig


def _wanted(
    host: HostSnapshot, intent: DefineVgpu, gpu: Gpu, old: FunctionDefinition | None
) -> FunctionDefinition:
    address = PciAddress.parse(intent.name)
    type_id, type_name = _type(host, intent, gpu, old)
    read = dict(host.defined.attributes_of(intent.name)).get(PARAMETERS, "").strip()
    base = old or FunctionDefinition(address, type_id, parameters=read)
    new = replace(base, type_id=type_id, type_name=type_name)
    if intent.autostart is not None:
        new = replace(new, start="auto" if intent.autostart else "manual")
    if intent.attributes is not None:
        new = replace(new, parameters=_parameters(intent))
    return new


def _type(
    host: HostSnapshot, intent: DefineVgpu, gpu: Gpu, old: FunctionDefinition | None
) -> tuple[str, str | None]:
    """Number and name: as told, as defined, or as it is active."""
    active = host.vgpu(intent.name)
    if intent.type is None:
        if old is not None:
            return old.type_id, old.type_name
        if active is not None:
            return active.type, active.type_name
        message = f"{intent.name} is no vGPU now that could be defined as it is"
        raise UsageError(message, "name --type; vfiomgr vgpu types shows them")
    for kind in types_called(gpu.types, intent.type):
        return kind.id, kind.name
    if active is not None and intent.type in (active.type, active.type_name):
        return active.type, active.type_name
    names = ", ".join(map(str, gpu.types))
    message = f"{gpu.name} offers no vGPU type {intent.type}; it offers {names or 'none now'}"
    raise UnknownDevice(message, "a GPU names only what still fits; vfiomgr vgpu types shows it")


def _parameters(intent: DefineVgpu) -> str:
    for name, _ in intent.attributes or ():
        if name != PARAMETERS:
            message = f"--attribute {name}: a virtual function keeps {PARAMETERS} alone"
            raise UsageError(message, f"write --attribute {PARAMETERS}=a=1,b=2")
    return "".join(text for _, text in intent.attributes or ())
