"""Attributes for requested quotas, and the steps that set them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.persistence.steps import ReplaceFile
from vfiomgr.sriov.steps import ALL, QuotaChange, SetQuotas
from vfiomgr.vgpu.quota.model import (
    AUTO,
    BULK_PRIORITY,
    PHYSICAL_PRIORITY,
    QUANTITIES,
    SHARED,
    is_of_memory,
    record_file,
    record_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.engine.plan import Step
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.vgpu.quota.model import FunctionQuotas, GpuQuotas, VfQuota

_ALIGNED = {"ggtt_quota": 2 << 20, "contexts_quota": 128}
"""Alignment in i915 (CTXS_GRANULARITY in intel_iov_provisioning.c); doorbells have none."""


def wanted(known: GpuQuotas, share: VfQuota, numbers: Iterable[int]) -> dict[str, str]:
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


def texts(known: GpuQuotas) -> dict[str, str | None]:
    """All settable attributes and their values."""
    found: dict[str, str | None] = {AUTO: known.auto} if known.auto is not None else {}
    for function in known.functions:
        for attribute in function.attributes:
            found[attribute.name] = attribute.value
    return found


def default(name: str) -> str:
    """The assumed value of an attribute that differs between tiles, which cannot be restored."""
    return "low" if name.endswith("sched_priority") else "0"


def is_hosts(name: str) -> bool:
    """Whether an attribute belongs to the physical function."""
    return name.startswith("pf/") and name != AUTO


def originals(known: GpuQuotas) -> dict[str, str]:
    """The original values of the attributes that vfiomgr changed."""
    return {attribute.name: attribute.text or "" for attribute in known.originals}


def base(device: PciDevice, known: GpuQuotas, name: str, text: str) -> str:
    """The value of an attribute without vfiomgr and without virtual functions.

    xe frees all memory with the functions (Documentation/ABI/testing), i915 only what it divided
    itself.
    """
    original = known.original(name)
    if original is not None:
        return original
    return "0" if device.sriov_numvfs and _is_driver_made(known, name) else text


def at_none(device: PciDevice, known: GpuQuotas, name: str, text: str) -> str:
    """The value of an attribute after the functions are removed."""
    return "0" if device.sriov_numvfs and _is_driver_made(known, name) else text


def _is_driver_made(known: GpuQuotas, name: str) -> bool:
    return name != AUTO and is_of_memory(name) and (known.auto in (None, "1"))


def steps(
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
        if any(_grows(change) for change in own):
            growing.append(step)
        else:
            yield step
    yield from growing


def _place(name: str) -> int:
    """Sort key for attributes: memory, then related resources, then time."""
    kinds = (*(kind for kind in QUANTITIES if is_of_memory(kind)), *SHARED, *QUANTITIES)
    return kinds.index(name.rpartition("/")[2])


def _grows(change: QuotaChange) -> bool:
    return is_of_memory(change.name) and int(change.after) > int(change.before)


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


def recorded(
    known: GpuQuotas, after: dict[str, str], before: dict[str, str] | None = None
) -> Iterator[Step]:
    """The step that writes the record, unless it is up to date."""
    old = record_text(originals(known) if before is None else before)
    new = record_text(after)
    if old != new:
        yield ReplaceFile(record_file(known.gpu), old, new)
