"""Plans for quotas of virtual functions, before, during and after their existence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, blocker, refuse_if_any
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import Plan, Step
from vfiomgr.engine.registry import plans, resolves
from vfiomgr.passthrough import guards
from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.sriov.steps import ALL, ChangeQuotas, QuotaChange, QuotasCheckpoint, SetQuotas
from vfiomgr.value import Value
from vfiomgr.vgpu.quota.capacity import impossible, incomplete, too_much
from vfiomgr.vgpu.quota.model import (
    AUTO,
    BULK_PRIORITY,
    PHYSICAL_PRIORITY,
    QUANTITIES,
    SHARED,
    in_bytes,
    is_met,
    is_of_memory,
    record_file,
    record_text,
)

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.sriov.steps import SetVirtualFunctions
    from vfiomgr.vgpu.quota.model import FunctionQuotas, GpuQuotas, VfQuota

_ALIGNED = {"ggtt_quota": 2 << 20, "contexts_quota": 128}
"""Alignment in i915 (CTXS_GRANULARITY in intel_iov_provisioning.c); doorbells have none."""


def wanted_texts(known: GpuQuotas, share: VfQuota, numbers: Iterable[int]) -> dict[str, str]:
    """The target values of attributes."""
    found: dict[str, str] = {}
    functions = [f for number in numbers if (f := known.function(number)) is not None]
    if share.memory is not None and known.auto is not None:
        found[AUTO] = "0"
    for function in functions:
        found |= dict(_of_function(known, function, share, len(functions)))
    if share.sched_priority is not None:
        for function in functions:
            for attribute in function.of("sched_priority"):
                found[attribute.name] = share.sched_priority
    return found


def _of_function(
    known: GpuQuotas, function: FunctionQuotas, share: VfQuota, count: int
) -> Iterator[tuple[str, str]]:
    memory = function.of("memory")
    if share.memory is not None:
        for attribute in memory:
            yield attribute.name, str(-(-share.memory // len(memory)))
        # i915 then divides nothing itself, neither memory nor other resources of a function.
        for attribute in (a for a in function.shared if a.is_writable):
            yield attribute.name, str(_fair(known, attribute.name, attribute.kind, count))
    for quantity in ("exec_quantum_ms", "preempt_timeout_us"):
        value = getattr(share, quantity)
        for attribute in function.attributes if value is not None else ():
            if attribute.kind == quantity:
                yield attribute.name, str(value)


def _fair(known: GpuQuotas, name: str, kind: str, count: int) -> int:
    """An equal share of a resource on a tile, including what functions already have."""
    tile = name.split("/")[1]
    free = f"{tile}/{kind.removesuffix('_quota')}_free"
    left = sum(supply.number or 0 for supply in known.supplies if supply.name == free)
    for function in known.virtual:
        for attribute in function.shared:
            if attribute.kind == kind and attribute.name.split("/")[1] == tile:
                left += attribute.number or 0
    unit = _ALIGNED.get(kind, 1)
    return left // count // unit * unit


def present_texts(known: GpuQuotas) -> dict[str, str | None]:
    """All settable attributes and their values."""
    found: dict[str, str | None] = {AUTO: known.auto} if known.auto is not None else {}
    for function in known.functions:
        for attribute in function.attributes:
            found[attribute.name] = attribute.value
    return found


def default_text(name: str) -> str:
    """The assumed value of an attribute that differs between tiles, which cannot be restored."""
    return "low" if name.endswith("sched_priority") else "0"


def is_of_physical(name: str) -> bool:
    """Whether an attribute belongs to the physical function."""
    return name.startswith("pf/") and name != AUTO


def original_texts(known: GpuQuotas) -> dict[str, str]:
    """The original values of the attributes that vfiomgr changed."""
    return {attribute.name: attribute.text or "" for attribute in known.originals}


def text_without_functions(device: PciDevice, known: GpuQuotas, name: str, text: str) -> str:
    """The value of an attribute without vfiomgr and without virtual functions."""
    original = known.original(name)
    return text_at_none(device, known, name, text) if original is None else original


def text_at_none(device: PciDevice, known: GpuQuotas, name: str, text: str) -> str:
    """The value of an attribute after the functions are removed.

    xe frees all memory with the functions (Documentation/ABI/testing), i915 only what it divided
    itself.
    """
    is_made_by_driver = name != AUTO and is_of_memory(name) and known.auto in (None, "1")
    return "0" if device.sriov_numvfs and is_made_by_driver else text


def quota_steps(
    device: PciDevice,
    known: GpuQuotas,
    changes: dict[str, tuple[str, str]],
    priority_after: str | None = None,
) -> Iterator[SetQuotas]:
    """The steps, one per function; functions that free resources come first."""
    auto = changes.get(AUTO)
    if auto == ("1", "0"):
        yield _step(device, known, 0, [QuotaChange(AUTO, *auto)])
    yield from _of_functions(device, known, changes)
    yield from _priorities(device, known, changes, priority_after)
    if auto is not None and auto != ("1", "0"):
        yield _step(device, known, 0, [QuotaChange(AUTO, *auto)])


def kept_shares(device: PciDevice, known: GpuQuotas) -> Iterator[SetQuotas]:
    """The quotas that xe drops with the functions, and that an undo restores.

    i915 keeps explicit quotas, and divides the rest again itself.
    """
    for number in range(1, (device.sriov_numvfs or 0) + 1 if known.interface == "xe" else 1):
        function = known.function(number)
        own = [
            QuotaChange(attribute.name, before="0", after=attribute.text)
            for attribute in (function.attributes if function is not None else ())
            if attribute.is_writable and attribute.number and attribute.text is not None
        ]
        if own:
            own.sort(key=lambda change: _place(change.name))
            yield _step(device, known, number, own)


def _of_functions(
    device: PciDevice, known: GpuQuotas, changes: dict[str, tuple[str, str]]
) -> Iterator[SetQuotas]:
    growing: list[SetQuotas] = []
    for function in known.functions:
        own = [
            QuotaChange(attribute.name, *changes[attribute.name])
            for attribute in function.attributes
            if attribute.name in changes and attribute.kind != "sched_priority"
        ]
        own.sort(key=lambda change: _place(change.name))
        if not own:
            continue
        step = _step(device, known, function.number, own)
        memory = (change for change in own if is_of_memory(change.name))
        if any(int(change.after) > int(change.before) for change in memory):
            growing.append(step)
        else:
            yield step
    yield from growing


def _place(name: str) -> int:
    """Sort key for attributes: memory, then related resources, then time."""
    kinds = (*(kind for kind in QUANTITIES if is_of_memory(kind)), *SHARED, *QUANTITIES)
    return kinds.index(name.rpartition("/")[2])


def _priorities(
    device: PciDevice,
    known: GpuQuotas,
    changes: dict[str, tuple[str, str]],
    priority_after: str | None,
) -> Iterator[SetQuotas]:
    """Set the priority of all functions with one write, and restore that of the physical function.

    The physical function gets the priority of the virtual ones before the write, so that an undo
    also restores it.
    """
    text = known.text(PHYSICAL_PRIORITY)
    now, own = changes.get(PHYSICAL_PRIORITY, (text, priority_after or text))
    first = known.function(1)
    shown = next((a.name for a in first.of("sched_priority")), "") if first else ""
    bulk = changes.get(shown)
    if bulk is not None:
        change = QuotaChange(BULK_PRIORITY, *bulk, shown)
        if bulk[0] != bulk[1] and now not in (None, bulk[0]):
            yield _step(device, known, 0, [QuotaChange(PHYSICAL_PRIORITY, now or "", bulk[0])])
        yield _step(device, known, ALL, [change])
        now = now if bulk[0] == bulk[1] else bulk[1]
    if now is not None and own not in (None, now):
        yield _step(device, known, 0, [QuotaChange(PHYSICAL_PRIORITY, now, own or "")])


def _step(
    device: PciDevice, known: GpuQuotas, function: int, changes: list[QuotaChange]
) -> SetQuotas:
    return SetQuotas(device.identity, known.directory, function, tuple(changes))


def record_steps(
    known: GpuQuotas, after: dict[str, str], before: dict[str, str] | None = None
) -> Iterator[Step]:
    """The step that writes the record, unless it is up to date."""
    old = record_text(original_texts(known) if before is None else before)
    new = record_text(after)
    if old != new:
        yield ReplaceFile(record_file(known.gpu), old, new)


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
    targets = share and count and wanted_texts(known, share, range(1, count + 1))
    wanted = targets or {}
    originals = original_texts(known)
    bases: dict[str, str] = {}
    changed: dict[str, tuple[str, str]] = {}
    for name, read in present_texts(known).items():
        text = default_text(name) if read is None else read
        bases[name] = text_without_functions(device, known, name, text)
        if count and is_of_physical(name):
            continue
        before, after = text_at_none(device, known, name, text), wanted.get(name)
        after = bases[name] if after is None else after
        if not is_met(name, after, before):
            changed[name] = (before, after)
    kept = {n: bases[n] for n, text in wanted.items() if not is_met(n, text, bases[n])}
    kept |= {n: text for n, text in originals.items() if count and is_of_physical(n)}
    checks = {name: (text, text) for name, text in wanted.items()}
    return Provision(
        opening=tuple(record_steps(known, kept | originals)),
        kept=tuple(kept_shares(device, known)),
        between=tuple(quota_steps(device, known, changed, priority)),
        checks=tuple(quota_steps(device, known, checks)),
        closing=tuple(record_steps(known, kept, kept | originals)),
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
            yield from incomplete(known, wanted_texts(known, share, numbers))


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
    wanted = wanted_texts(known, request.share, numbers)
    texts = present_texts(known)
    changed = {
        name: (texts[name] or default_text(name), text)
        for name, text in wanted.items()
        if not is_met(name, text, texts[name])
    }
    refuse_if_any(_unchangeable(physical, named, known, request, changed))
    if request.share.memory is not None and changed:
        others = sum(f.memory or 0 for f in known.virtual if f.number not in numbers)
        exceeded = too_much(physical, known, request.share, numbers, others)
        refuse_if_any([*exceeded, *_held(host, physical, numbers)])
    priority = None if checkpoint is None else checkpoint.priority
    steps = tuple(quota_steps(physical, known, changed, priority))
    first = {
        name: text_without_functions(physical, known, name, before)
        for name, (before, _) in changed.items()
    }
    record = tuple(record_steps(known, first | original_texts(known)))
    return Plan(
        summary=f"set the quotas of {request.address}: {request.share}",
        steps=(*(record if steps else ()), *steps),
        locks=_locks(host, physical),
        resolves=(str(named.address),),
        notes=tuple(_notes(known, request)) if steps else (),
        already=() if steps else (f"{named} already has {request.share}",),
    )


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
