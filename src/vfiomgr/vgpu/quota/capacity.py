"""Plain virtual functions as vGPUs: existing ones, capacity, and refusals of quotas."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker, refusal, refuse
from vfiomgr.passthrough.guards import GIM, GIM_OPTIONS
from vfiomgr.units import MIB
from vfiomgr.vgpu.capacity import Capacity, Gpu
from vfiomgr.vgpu.model import Vgpu, VgpuParent, VgpuType, function_vgpu
from vfiomgr.vgpu.quota.model import SHARED, GpuQuotas, Quantity, VfQuota, in_bytes

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


_NAMES: dict[Quantity, str] = {
    "memory": "--vf-memory",
    "exec_quantum_ms": "--exec-quantum",
    "preempt_timeout_us": "--preempt-timeout",
    "sched_priority": "--priority",
}


def impossible(
    host: HostSnapshot, device: PciDevice, share: VfQuota, *, is_physical: bool = False
) -> Iterator[Diagnostic]:
    """Refuse quotas that the driver does not support in any state of the functions."""
    known = host.vgpus.quotas_of(device)
    if device.driver == GIM:
        yield fixed_at_load(device, "divides memory and time")
    elif known is None:
        yield _no_quotas(device)
    elif known.interface == "debugfs":
        yield blocker(
            "quota-unavailable",
            device,
            f"xe of this kernel ({host.kernel.release or 'before 6.19'}) has quotas only in "
            "debugfs, where setting one stops the driver from assigning the other resources of a "
            "virtual function",
            "xe supports time and priority since Linux 6.19, memory since 7.0; " + _without(device),
        )
    else:
        for quantity in share.quantities:
            yield from _missing(device, known, quantity, is_physical=is_physical)
        if share.sched_priority == "high" and not is_physical and known.interface == "xe":
            yield blocker(
                "quota-unavailable",
                device,
                "virtual functions cannot have priority high: the GPU's firmware (GuC) reserves it "
                "for the physical function",
                "use --priority normal; or for the physical function: vfiomgr sriov set "
                f"{device.address} --physical --priority high",
            )


def too_much(
    device: PciDevice, known: GpuQuotas, share: VfQuota, numbers: Sequence[int], others: int = 0
) -> Iterator[Diagnostic]:
    """Refuse more memory than the GPU has, if known; `others` is the memory that stays assigned."""
    if share.memory is None or known.memory is None:
        return
    left = max(0, known.memory - others)
    wanted = share.memory * len(numbers)
    if wanted > left:
        each = in_bytes(left // len(numbers) >> 20 << 20)
        taken = f", of which {in_bytes(others)} are assigned to others" if others else ""
        yield blocker(
            "quota-exceeded",
            device,
            f"{len(numbers)} x {in_bytes(share.memory)} is {in_bytes(wanted)}, but {device} "
            f"has {in_bytes(known.memory)}{taken}",
            f"request at most {each} each, or fewer functions",
        )


def incomplete(known: GpuQuotas, wanted: dict[str, str]) -> Iterator[Diagnostic]:
    """Refuse a memory quota on i915 if other resources are unknown, as it divides none of them."""
    lacking = {name.rpartition("/")[2] for name, text in wanted.items() if text == "0"} & {*SHARED}
    if lacking:
        kinds = ", ".join(sorted(kind.removesuffix("_quota") for kind in lacking))
        yield blocker(
            "quota-incomplete",
            known.gpu,
            f"i915 of {known.gpu} does not report the remaining {kinds}, of which each function "
            "with a memory quota needs a share",
            "leave out --vf-memory: i915 then divides everything evenly",
        )


def fixed_at_load(device: PciDevice, what: str) -> Diagnostic:
    """Refuse changes on AMD's GIM, which reads its options only when loaded (gim_config.c)."""
    return blocker(
        "fixed-at-load",
        device,
        f"{device} is on AMD's GIM, which {what} only when the module is loaded",
        GIM_OPTIONS,
    )


def _no_quotas(device: PciDevice) -> Diagnostic:
    driver = device.driver or "no driver"
    if device.driver in ("xe", "i915"):
        return blocker(
            "quota-unavailable",
            device,
            f"{device} is on {driver}, which does not show quotas of virtual functions",
            "xe shows them since Linux 6.19, and Intel's own i915 with SR-IOV does; "
            + _without(device),
        )
    return blocker(
        "quota-unavailable",
        device,
        f"{device} is on {driver}, which does not support quotas of virtual functions",
        "Intel's xe and i915 support them; " + _without(device),
    )


def _missing(
    device: PciDevice, known: GpuQuotas, quantity: Quantity, *, is_physical: bool
) -> Iterator[Diagnostic]:
    number = 0 if is_physical else 1
    if known.has(quantity, number) and not known.can_set(quantity, number):
        yield blocker(
            "quota-read-only",
            device,
            f"{_NAMES[quantity]} is read-only on {device}: its driver divides it itself",
            _without(device, _NAMES[quantity]),
        )
    if known.has(quantity, number):
        return
    if is_physical and quantity == "memory":
        remedy = "leave out --vf-memory: the host uses the memory that virtual functions leave"
        yield blocker(
            "quota-unavailable",
            device,
            f"the physical function {device} has no memory quota",
            remedy,
        )
        return
    yield blocker(
        "quota-unavailable",
        device,
        f"{device} on {device.driver} has no quota for {_NAMES[quantity]}",
        f"{_WHEN[known.interface == 'i915', quantity]}; {_without(device, _NAMES[quantity])}",
    )


_WHEN: dict[tuple[bool, Quantity], str] = {
    (False, "memory"): "xe supports vram_quota since Linux 7.0, on GPUs with their own memory",
    (False, "exec_quantum_ms"): "xe supports it since Linux 6.19, if functions share time slices",
    (False, "preempt_timeout_us"): (
        "xe supports it since Linux 6.19, if functions share time slices"
    ),
    (False, "sched_priority"): "xe supports it since Linux 6.19, if functions share time slices",
    (True, "memory"): "i915 supports lmem_quota on GPUs with their own memory",
    (True, "exec_quantum_ms"): "Intel's own i915 with SR-IOV supports it",
    (True, "preempt_timeout_us"): "Intel's own i915 with SR-IOV supports it",
    (True, "sched_priority"): "xe supports priorities since Linux 6.19",
}


def _without(device: PciDevice, option: str = "the quotas") -> str:
    return f"leave out {option} to let the driver divide it: vfiomgr sriov set {device.address} N"


TYPE = "vf"
"""The only type of such vGPUs; their resources are set by quotas."""


def function_vgpus(host: HostSnapshot) -> tuple[Vgpu, ...]:
    """The virtual functions that are vGPUs themselves."""
    found: list[Vgpu] = []
    for gpu in _divided(host):
        for device in host.devices:
            if device.address in gpu.virtual_functions:
                quotas = host.function_quotas(device)
                name = None if quotas is None else str(quotas)
                found.append(function_vgpu(device, "sriov-vf", TYPE, name))
    return tuple(found)


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
            known = host.vgpus.quotas_of(gpu)
            memory = " --vf-memory SIZE" if known is not None and known.has("memory") else ""
            remedy = (
                f"create them: vfiomgr sriov set {gpu.address} {count + len(functions)}{memory}; "
                "then bind each one: vfiomgr bind ADDRESS"
            )
        refuse("functions-made-together", gpu, message, remedy)


def _divided(host: HostSnapshot) -> Iterator[PciDevice]:
    """GPUs whose virtual functions are vGPUs themselves."""
    known = {quotas.gpu for quotas in host.vgpus.quotas}
    for device in host.devices:
        if device.sriov_totalvfs and (str(device.address) in known or device.driver == GIM):
            yield device


def _room(host: HostSnapshot, device: PciDevice, vgpus: tuple[Vgpu, ...]) -> tuple[Gpu, Capacity]:
    """The remaining capacity of a GPU, and the memory of its functions if it is equal."""
    name, total, made = str(device.address), device.sriov_totalvfs or 0, device.sriov_numvfs or 0
    quotas = host.vgpus.quotas_of(device)
    functions = quotas.virtual[:made] if quotas is not None else ()
    sizes = {function.memory for function in functions}
    size = sizes.pop() if len(sizes) == 1 else None
    left = None
    if quotas is not None and quotas.memory is not None:
        left = max(0, quotas.memory - quotas.taken) // MIB
    kind = VgpuType(
        id=TYPE,
        name="virtual function",
        description=None,
        device_api="vfio-pci",
        series=None,
        framebuffer=size // MIB if size else None,
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
    memory = "" if left is None else f"; {left:,} MiB of memory remain"
    if made:
        return f"{made} of {total} VFs created{memory}; vfiomgr sriov set replaces them all"
    return f"vfiomgr sriov set {device.address} N creates N VFs{memory}"
