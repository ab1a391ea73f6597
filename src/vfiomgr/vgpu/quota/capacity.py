"""Plain virtual functions as vGPUs: existing ones, and the capacity of their GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import blocker, refusal
from vfiomgr.vgpu.capacity import Capacity, Gpu
from vfiomgr.vgpu.model import Vgpu, VgpuParent, VgpuType
from vfiomgr.vgpu.quota.model import in_bytes
from vfiomgr.vgpu.quota.refusals import GIM, fixed_at_load

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

TYPE = "vf"
"""The only type of such vGPUs; their resources are set by quotas."""
_MIB = 1 << 20


def function_vgpus(host: HostSnapshot) -> tuple[Vgpu, ...]:
    """The virtual functions that are vGPUs themselves."""
    return tuple(
        Vgpu(
            uuid=None,
            family="sriov-vf",
            parent=str(device.address),
            type=TYPE,
            type_name=_quotas_in_words(host, device),
            driver=device.driver,
            iommu_group=device.iommu_group,
            vfio_device=device.vfio_device,
            numa_node=device.numa_node,
        )
        for gpu in _divided(host)
        for device in host.devices
        if device.address in gpu.virtual_functions
    )


def function_rooms(host: HostSnapshot) -> tuple[tuple[Gpu, Capacity], ...]:
    """The capacity of GPUs whose virtual functions are vGPUs."""
    vgpus = function_vgpus(host)
    return tuple(_room(host, device, vgpus) for device in _divided(host))


def refuse_function(host: HostSnapshot, name: str | None, *, count: int | None = None) -> None:
    """Refuse to create or remove such a vGPU separately: its driver handles all at once.

    Raises:
        Refusal: `name` is such a vGPU or its GPU.

    """
    for gpu in _divided(host):
        functions = tuple(str(address) for address in gpu.virtual_functions)
        if name not in (str(gpu.address), *functions):
            continue
        if gpu.driver == GIM:
            diagnostic = fixed_at_load(gpu, "creates virtual functions")
            raise refusal([diagnostic])
        message = f"the driver of {gpu} creates and removes all virtual functions at once"
        if count is None:
            remedy = f"remove all {len(functions)}: vfiomgr sriov set {gpu.address} 0"
        else:
            memory = " --vf-memory SIZE" if _has_memory(host, gpu) else ""
            remedy = (
                f"create them: vfiomgr sriov set {gpu.address} {count + len(functions)}{memory}; "
                "then bind each one: vfiomgr bind ADDRESS"
            )
        raise refusal([blocker("functions-made-together", gpu, message, remedy)])


def _divided(host: HostSnapshot) -> Iterator[PciDevice]:
    """GPUs whose virtual functions are vGPUs themselves."""
    known = {quotas.gpu for quotas in host.quotas}
    for device in host.devices:
        if device.sriov_totalvfs and (str(device.address) in known or device.driver == GIM):
            yield device


def _quotas_in_words(host: HostSnapshot, device: PciDevice) -> str | None:
    quotas = host.function_quotas(device)
    return None if quotas is None else str(quotas)


def _has_memory(host: HostSnapshot, gpu: PciDevice) -> bool:
    known = host.quotas_of(gpu)
    return known is not None and known.has("memory")


def _room(host: HostSnapshot, device: PciDevice, vgpus: tuple[Vgpu, ...]) -> tuple[Gpu, Capacity]:
    """The remaining capacity of a GPU, and the memory of its functions if it is equal."""
    name, total, made = str(device.address), device.sriov_totalvfs or 0, device.sriov_numvfs or 0
    quotas = host.quotas_of(device)
    functions = quotas.virtual[:made] if quotas is not None else ()
    sizes = {function.memory for function in functions}
    size = sizes.pop() if len(sizes) == 1 else None
    left = None
    if quotas is not None and quotas.memory is not None:
        left = max(0, quotas.memory - quotas.taken) // _MIB
    kind = VgpuType(
        id=TYPE,
        name="virtual function",
        description=None,
        device_api="vfio-pci",
        series=None,
        framebuffer=size // _MIB if size else None,
        heads=None,
        resolution=None,
        max_instances=total,
    )
    more = 0 if made else total
    own = {str(address) for address in device.virtual_functions}
    gpu = Gpu(
        name=name,
        device=device,
        parents=(VgpuParent(name, name, "sriov-vf", device.driver, name, (kind,), (more,)),),
        instances=tuple(vgpu for vgpu in vgpus if vgpu.parent in own),
        mode=None,
    )
    # The driver creates as many as it has resources for, which it does not report in advance.
    return gpu, Capacity(kind, more, not more, _note(device, made, total, left), left)


def _note(device: PciDevice, made: int, total: int, left: int | None) -> str:
    if device.driver == GIM:
        return f"{made} of {total} created; AMD's GIM creates them when loaded (vf_num)"
    memory = "" if left is None else f", {in_bytes(left * _MIB)} of memory left"
    if made:
        return f"{made} of {total} created, all at once{memory}: vfiomgr sriov set"
    return f"all are created at once{memory}: vfiomgr sriov set {device.address} N"
