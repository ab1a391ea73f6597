"""What speaks against quotas: drivers that have none, and more memory than there is."""

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
"""AMD's driver, which makes virtual functions as it is loaded."""
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
    """What no state of the functions would change: the driver has no such quota."""
    known = host.quotas_of(device)
    if device.driver == GIM:
        yield fixed_at_load(device, "their memory and their time are shared out")
    elif known is None:
        yield _no_quotas(device)
    elif known.interface == "debugfs":
        yield blocker(
            "quota-unavailable",
            device,
            f"xe of this kernel ({host.kernel_release or 'before 6.19'}) has quotas in debugfs "
            "alone: one that is set there keeps the driver from sharing out all that a virtual "
            "function needs besides",
            "xe sets time and priority as of Linux 6.19, memory as of 7.0; " + _without(device),
        )
    else:
        for quantity in share.quantities:
            yield from _missing(device, known, quantity, is_physical=is_physical)
        if share.sched_priority == "high" and not is_physical and known.interface == "xe":
            yield blocker(
                "quota-unavailable",
                device,
                "virtual functions have no priority high: the GPU's firmware (GuC) keeps that for "
                "the physical function",
                "--priority normal; or for the host's own share, vfiomgr sriov quota "
                f"{device.address} --physical --priority high",
            )


def too_much(
    device: PciDevice, known: GpuQuotas, share: VfQuota, numbers: Sequence[int], others: int = 0
) -> Iterator[Diagnostic]:
    """More memory than the GPU has, where the host tells how much that is; `others` keep theirs."""
    if share.memory is None or known.memory is None:
        return
    left = max(0, known.memory - others)
    wanted = share.memory * len(numbers)
    if wanted > left:
        each = in_bytes(left // len(numbers) >> 20 << 20)
        taken = f", of which others have {in_bytes(others)}" if others else ""
        yield blocker(
            "quota-exceeded",
            device,
            f"{len(numbers)} times {in_bytes(share.memory)} is {in_bytes(wanted)}, and {device} "
            f"has {in_bytes(known.memory)}{taken}",
            f"ask for {each} each at most, or for fewer functions",
        )


def incomplete(known: GpuQuotas, wanted: dict[str, str]) -> Iterator[Diagnostic]:
    """With a quota of memory i915 shares out nothing else, and of nothing there are no shares."""
    lacking = {name.rpartition("/")[2] for name, text in wanted.items() if text == "0"} & {*SHARED}
    if lacking:
        kinds = ", ".join(sorted(kind.removesuffix("_quota") for kind in lacking))
        yield blocker(
            "quota-incomplete",
            known.gpu,
            f"i915 of {known.gpu} does not tell how many are left of: {kinds}; with a quota of "
            "memory each function needs its share of them too",
            "leave out --vf-memory: then i915 shares out everything alike",
        )


def fixed_at_load(device: PciDevice, what: str) -> Diagnostic:
    """AMD's GIM has no sriov_configure; it reads its options as it is loaded (gim_config.c)."""
    return blocker(
        "fixed-at-load",
        device,
        f"{device} is on AMD's GIM, and {what} once, when the module is loaded",
        f"set vf_num (and of GIM for older GPUs vf_fb, in MiB) in {_CONFIG}, or as an option of "
        "the module gim in /etc/modprobe.d, which goes before; then, with all guests shut down, "
        "modprobe -r gim and modprobe gim",
    )


def _no_quotas(device: PciDevice) -> Diagnostic:
    driver = device.driver or "no driver"
    if device.driver in ("xe", "i915"):
        return blocker(
            "quota-unavailable",
            device,
            f"{device} is on {driver}, which shows no quotas of its virtual functions",
            "xe shows them as of Linux 6.19, i915 where it is Intel's own with SR-IOV; "
            + _without(device),
        )
    return blocker(
        "quota-unavailable",
        device,
        f"{device} is on {driver}, which has no quotas of virtual functions",
        "Intel's xe and i915 have; " + _without(device),
    )


def _missing(
    device: PciDevice, known: GpuQuotas, quantity: Quantity, *, is_physical: bool
) -> Iterator[Diagnostic]:
    number = 0 if is_physical else 1
    if known.has(quantity, number) and not known.can_set(quantity, number):
        yield blocker(
            "quota-read-only",
            device,
            f"{_NAMES[quantity]} can only be read of {device}: its driver shares it out itself",
            _without(device, _NAMES[quantity]),
        )
    if known.has(quantity, number):
        return
    if is_physical and quantity == "memory":
        remedy = "the host has what its virtual functions leave; leave out --vf-memory"
        yield blocker(
            "quota-unavailable",
            device,
            f"the physical function {device} has no quota of memory",
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
    (False, "memory"): "xe has vram_quota as of Linux 7.0, on GPUs with memory of their own",
    (False, "exec_quantum_ms"): "xe has it as of Linux 6.19, where functions share the GPU by time",
    (False, "preempt_timeout_us"): (
        "xe has it as of Linux 6.19, where functions share the GPU by time"
    ),
    (False, "sched_priority"): "xe has it as of Linux 6.19, where functions share the GPU by time",
    (True, "memory"): "i915 has lmem_quota on GPUs with memory of their own",
    (True, "exec_quantum_ms"): "i915 with SR-IOV, Intel's own, has it",
    (True, "preempt_timeout_us"): "i915 with SR-IOV, Intel's own, has it",
    (True, "sched_priority"): "xe has priorities, as of Linux 6.19",
}


def _without(device: PciDevice, option: str = "the quotas") -> str:
    return f"leave out {option}: vfiomgr sriov set {device.address} N lets the driver share it out"
