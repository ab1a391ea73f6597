"""Plans for quotas of virtual functions, before, during and after their existence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, blocker, refuse_if_any
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import Plan, Step
from vfiomgr.engine.registry import plans, resolves
from vfiomgr.passthrough import guards
from vfiomgr.sriov import quota_changes
from vfiomgr.sriov.steps import ChangeQuotas, QuotasCheckpoint, SetQuotas
from vfiomgr.value import Value
from vfiomgr.vgpu.quota.capacity import impossible, incomplete, too_much
from vfiomgr.vgpu.quota.model import AUTO, PHYSICAL_PRIORITY, in_bytes, is_met, is_of_memory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.sriov.steps import SetVirtualFunctions
    from vfiomgr.vgpu.quota.model import GpuQuotas, VfQuota


class Provision(Value):
    """The quota steps around a change of the number of virtual functions."""

    opening: tuple[Step, ...] = ()
    """First steps: save the original quotas."""
    kept: tuple[SetQuotas, ...] = ()
    """The quotas of the existing functions, which a rollback restores."""
    between: tuple[Step, ...] = ()
    """Steps while there are no virtual functions."""
    checks: tuple[Step, ...] = ()
    """Steps after the new functions exist, to correct drivers that reset time quotas."""
    closing: tuple[Step, ...] = ()
    """Last steps: delete the record of restored quotas."""


def provision(
    host: HostSnapshot,
    device: PciDevice,
    request: SetVirtualFunctions,
    priority: str | None,
) -> Provision | None:
    """Plan the quotas around a change of virtual functions; None if there are none to set.

    Without a request, the original quotas are restored and the driver decides. The quotas of the
    physical function are restored when the last virtual function is removed; `priority` is its
    original priority if an interrupted run has changed it.
    """
    count, share = request.count, request.share
    known = host.vgpus.quotas_of(device)
    if known is None or known.interface == "debugfs":
        return None
    targets = share and count and quota_changes.wanted(known, share, range(1, count + 1))
    wanted = targets or {}
    originals = quota_changes.originals(known)
    bases: dict[str, str] = {}
    changed: dict[str, tuple[str, str]] = {}
    for name, read in quota_changes.texts(known).items():
        text = quota_changes.default(name) if read is None else read
        bases[name] = quota_changes.base(device, known, name, text)
        if count and quota_changes.is_hosts(name):
            continue
        before, after = quota_changes.at_none(device, known, name, text), wanted.get(name)
        after = bases[name] if after is None else after
        if not is_met(name, after, before):
            changed[name] = (before, after)
    kept = {n: bases[n] for n, text in wanted.items() if not is_met(n, text, bases[n])}
    kept |= {n: text for n, text in originals.items() if count and quota_changes.is_hosts(n)}
    checks = {name: (text, text) for name, text in wanted.items()}
    return Provision(
        opening=tuple(quota_changes.recorded(known, kept | originals)),
        kept=tuple(quota_changes.kept_shares(device, known)),
        between=tuple(quota_changes.steps(device, known, changed, priority)),
        checks=tuple(quota_changes.steps(device, known, checks)),
        closing=tuple(quota_changes.recorded(known, kept, kept | originals)),
    )


@resolves(ChangeQuotas)
def resolve(
    host: HostSnapshot, request: ChangeQuotas, checkpoint: QuotasCheckpoint | None = None
) -> QuotasCheckpoint:
    """Record the priority of the physical function, which changes temporarily."""
    named = host.device(request.address)
    known = host.vgpus.quotas_of(host.device(named.physical_function or named.address))
    if request.is_physical or known is None:
        return checkpoint or QuotasCheckpoint()
    found = QuotasCheckpoint(known.text(PHYSICAL_PRIORITY))
    return found if checkpoint is None else checkpoint.completed(found)


def unaffordable(
    host: HostSnapshot, device: PciDevice, count: int, share: VfQuota
) -> Iterator[Diagnostic]:
    """Refuse quotas that are too large for `count` new functions."""
    known = host.vgpus.quotas_of(device)
    if known is not None and count:
        numbers = range(1, count + 1)
        yield from too_much(device, known, share, numbers)
        if share.memory is not None:
            yield from incomplete(known, quota_changes.wanted(known, share, numbers))


@plans(ChangeQuotas)
def plan_change(
    host: HostSnapshot, request: ChangeQuotas, checkpoint: QuotasCheckpoint | None = None
) -> Plan:
    """Change the quotas of existing functions.

    Raises:
        Refusal: their driver does not support the quota, or cannot change it now.
        UnknownDevice: the address is not found.

    """
    named = host.device(request.address)
    physical = named
    if named.physical_function is not None:
        physical = host.device(named.physical_function)
    numbers = _numbers(physical, named, request)
    refuse_if_any(
        [
            *guards.stuck(host, physical),
            *impossible(host, physical, request.share, is_physical=request.is_physical),
        ]
    )
    known = host.vgpus.quotas_of(physical)
    assert known is not None  # noqa: S101 - refused above
    refuse_if_any(_no_function(physical, numbers, request))
    wanted = quota_changes.wanted(known, request.share, numbers)
    texts = quota_changes.texts(known)
    changed = {
        name: (texts[name] or quota_changes.default(name), text)
        for name, text in wanted.items()
        if not is_met(name, text, texts[name])
    }
    refuse_if_any(_unchangeable(physical, named, known, request, changed))
    if request.share.memory is not None and changed:
        refuse_if_any(
            [
                *too_much(physical, known, request.share, numbers, _others(known, numbers)),
                *_held(host, physical, numbers),
            ]
        )
    priority = None if checkpoint is None else checkpoint.priority
    steps = tuple(quota_changes.steps(physical, known, changed, priority))
    record = tuple(quota_changes.recorded(known, _first_texts(physical, known, changed)))
    return Plan(
        summary=f"set the quotas of {request.address}: {request.share}",
        steps=(*(record if steps else ()), *steps),
        locks=_locks(host, physical),
        resolves=(str(named.address),),
        notes=tuple(_notes(known, request)) if steps else (),
        already=() if steps else (f"{named} already has {request.share}",),
    )


def _others(known: GpuQuotas, numbers: Iterable[int]) -> int:
    """Bytes assigned to other virtual functions."""
    return sum(f.memory or 0 for f in known.virtual if f.number not in numbers)


def _first_texts(
    physical: PciDevice, known: GpuQuotas, changed: dict[str, tuple[str, str]]
) -> dict[str, str]:
    """The values of the attributes after the functions are removed."""
    firsts = {
        name: quota_changes.base(physical, known, name, before)
        for name, (before, _) in changed.items()
    }
    return firsts | quota_changes.originals(known)


def _numbers(physical: PciDevice, named: PciDevice, request: ChangeQuotas) -> tuple[int, ...]:
    """The numbers of the requested functions."""
    if request.is_physical:
        return (0,)
    if named is not physical:
        return (physical.virtual_functions.index(named.address) + 1,)
    return tuple(range(1, len(physical.virtual_functions) + 1))


def _no_function(
    physical: PciDevice, numbers: tuple[int, ...], request: ChangeQuotas
) -> Iterator[Diagnostic]:
    if request.is_physical and physical.address != request.address:
        yield blocker(
            "not-a-physical-function",
            request.address,
            f"{request.address} is not a physical function",
            f"leave out --physical, or name {physical.address}",
        )
    elif not numbers:
        yield blocker(
            "no-virtual-functions",
            physical,
            f"{physical} has no virtual functions",
            f"create them with the quotas: vfiomgr sriov set {physical.address} N "
            f"{_options(request.share)}",
        )


def _unchangeable(
    physical: PciDevice,
    named: PciDevice,
    known: GpuQuotas,
    request: ChangeQuotas,
    changed: dict[str, tuple[str, str]],
) -> Iterator[Diagnostic]:
    """Refuse changes that the driver does not support for existing or single functions."""
    is_virtual = named is not physical
    if is_virtual and request.share.sched_priority is not None and changed:
        yield blocker(
            "quota-of-all",
            named,
            f"cannot set the priority of {named} separately: the GPU's firmware (GuC) has one for "
            "all virtual functions",
            f"name its physical function: vfiomgr sriov set {physical.address} "
            f"--priority {request.share.sched_priority}",
        )
    if known.interface == "i915" and any(map(is_of_memory, changed)):
        count = len(physical.virtual_functions)
        yield blocker(
            "quota-fixed",
            physical,
            f"i915 cannot change the memory of existing virtual functions, and {physical} "
            f"has {count}",
            f"vfiomgr sriov set {physical.address} 0; vfiomgr sriov set {physical.address} "
            f"{count} {_options(request.share)}",
        )


def _held(host: HostSnapshot, physical: PciDevice, numbers: Iterable[int]) -> Iterator[Diagnostic]:
    """Refuse functions in use: a new memory size is a new buffer (pf_provision_vf_lmem)."""
    for number in numbers:
        device = host.device_named(str(physical.virtual_functions[number - 1]))
        if device is None:
            continue
        for found in guards.held_by_pod(host, device):
            yield replace(found.without("allow"), override=None)
        users = host.holders(device)
        if users:
            yield blocker(
                "held-by-guest",
                device,
                f"{device} would lose its memory contents; it is in use by: "
                f"{', '.join(dict.fromkeys(map(str, users)))}",
                "shut the guest down first (time and priority can be changed while it runs)",
            )


def _options(share: VfQuota) -> str:
    """The quotas as command-line options."""
    parts = [
        f"--vf-memory {share.memory >> 20}M" if share.memory is not None else "",
        f"--exec-quantum {share.exec_quantum_ms}" if share.exec_quantum_ms is not None else "",
        f"--preempt-timeout {share.preempt_timeout_us}"
        if share.preempt_timeout_us is not None
        else "",
        f"--priority {share.sched_priority}" if share.sched_priority is not None else "",
    ]
    return " ".join(filter(None, parts))


def _locks(host: HostSnapshot, physical: PciDevice) -> tuple[str, ...]:
    functions = (d for d in host.devices if d.address in physical.virtual_functions)
    return tuple(sorted({device_lock(physical), *map(device_lock, functions)}))


def _notes(known: GpuQuotas, request: ChangeQuotas) -> Iterator[str]:
    if request.share.memory is not None:
        yield "guest drivers detect their memory at start: restart them afterwards"
    yield (f"restore the original quotas of {known.gpu} with: vfiomgr sriov set {known.gpu} 0")


def shares_in_words(known: GpuQuotas, count: int, share: VfQuota | None) -> str | None:
    """Describe how the driver divides the memory if no quota is requested."""
    if not count or (share is not None and share.memory is not None) or not known.has("memory"):
        return None
    if known.auto == "0":
        return f"i915 does not divide resources itself ({AUTO} is 0): quotas are unchanged"
    total = f" ({in_bytes(known.memory)} in total)" if known.memory else ""
    return f"the driver divides the memory evenly{total}; change it with --vf-memory"
