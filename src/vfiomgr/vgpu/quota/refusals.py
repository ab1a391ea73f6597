"""Refusals of quotas: unsupported by the driver, or more memory than the GPU has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, blocker
from vfiomgr.vgpu.quota.model import SHARED, in_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.quota.model import GpuQuotas, Quantity, VfQuota

GIM = "gim"
"""AMD's driver, which creates virtual functions when it is loaded."""
_NAMES: dict[Quantity, str] = {
    "memory": "--vf-memory",
    "exec_quantum_ms": "--exec-quantum",
    "preempt_timeout_us": "--preempt-timeout",
    "sched_priority": "--priority",
}
_CONFIG = "/etc/gim_config"


def impossible(
    host: HostSnapshot, device: PciDevice, share: VfQuota, *, is_physical: bool = False
) -> Iterator[Diagnostic]:
    """Refuse quotas that the driver does not support in any state of the functions."""
    known = host.quotas_of(device)
    if device.driver == GIM:
        yield fixed_at_load(device, "divides memory and time")
    elif known is None:
        yield _no_quotas(device)
    elif known.interface == "debugfs":
        yield blocker(
            "quota-unavailable",
            device,
            f"xe of this kernel ({host.kernel_release or 'before 6.19'}) has quotas only in "
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
        f"set vf_num (and vf_fb in MiB in GIM for older GPUs) in {_CONFIG}, or as an option of "
        "the module gim in /etc/modprobe.d, which takes precedence; shut all guests down, then "
        "run: modprobe -r gim; modprobe gim",
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
