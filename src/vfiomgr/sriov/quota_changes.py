"""From a share to the attributes that make it, and from these to steps."""

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

    from vfiomgr.engine.step import Step
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.vgpu.quota.model import FunctionQuotas, GpuQuotas, VfQuota

_ALIGNED = {"ggtt_quota": 2 << 20, "contexts_quota": 128}
"""What i915 rounds up to (CTXS_GRANULARITY in intel_iov_provisioning.c); doorbells are single."""


def wanted(known: GpuQuotas, share: VfQuota, numbers: Iterable[int]) -> dict[str, str]:
    """What attributes are to read."""
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
        # i915 shares nothing out any more, neither memory nor what a function needs besides.
        for attribute in (a for a in function.shared if a.is_writable):
            yield attribute.name, str(_fair(known, attribute.name, attribute.kind, count))
    for quantity in ("exec_quantum_ms", "preempt_timeout_us"):
        value = getattr(share, quantity)
        for attribute in function.attributes if value is not None else ():
            if attribute.kind == quantity:
                yield attribute.name, str(value)


def _fair(known: GpuQuotas, name: str, kind: str, count: int) -> int:
    """An equal share of what there is of it on a tile, with what functions have already."""
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
    """All attributes that can be set, and what they read."""
    found: dict[str, str | None] = {AUTO: known.auto} if known.auto is not None else {}
    for function in known.functions:
        for attribute in function.attributes:
            found[attribute.name] = attribute.value
    return found


def default(name: str) -> str:
    """What an attribute is taken for that tiles have otherwise each: no write restores that."""
    return "low" if name.endswith("sched_priority") else "0"


def is_hosts(name: str) -> bool:
    """Whether an attribute is of the physical function's own share."""
    return name.startswith("pf/") and name != AUTO


def originals(known: GpuQuotas) -> dict[str, str]:
    """What the attributes that vfiomgr changed had been before."""
    return {attribute.name: attribute.text or "" for attribute in known.originals}


def base(device: PciDevice, known: GpuQuotas, name: str, text: str) -> str:
    """What an attribute is to be without vfiomgr, and without functions.

    xe gives all memory back with the functions (Documentation/ABI/testing), i915 what it shared
    out itself.
    """
    original = known.original(name)
    if original is not None:
        return original
    return "0" if device.sriov_numvfs and _is_driver_made(known, name) else text


def at_none(device: PciDevice, known: GpuQuotas, name: str, text: str) -> str:
    """What an attribute reads once the functions are gone."""
    return "0" if device.sriov_numvfs and _is_driver_made(known, name) else text


def _is_driver_made(known: GpuQuotas, name: str) -> bool:
    return name != AUTO and is_of_memory(name) and (known.auto in (None, "1"))


def steps(
    device: PciDevice,
    known: GpuQuotas,
    changes: dict[str, tuple[str, str]],
    priority_after: str | None = None,
) -> Iterator[SetQuotas]:
    """A step for each function; whoever gives something back comes before those that get more."""
    auto = changes.get(AUTO)
    if auto == ("1", "0"):
        yield _step(device, known, 0, [QuotaChange(AUTO, *auto)])
    yield from _of_functions(device, known, changes)
    yield from _priorities(device, known, changes, priority_after)
    if auto is not None and auto != ("1", "0"):
        yield _step(device, known, 0, [QuotaChange(AUTO, *auto)])


def kept_shares(device: PciDevice, known: GpuQuotas) -> Iterator[SetQuotas]:
    """What xe forgets with the functions, and an undoing gives them again.

    i915 keeps what it was told, and shares out again what it had shared out itself.
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
    """Memory first, what goes with it next; then time."""
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
    """One write for all functions; the physical one keeps its own, on the way there and back.

    It has that of the virtual ones before the write, so that undoing it leads there too.
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
    """The record, where it does not say so already."""
    old = record_text(originals(known) if before is None else before)
    new = record_text(after)
    if old != new:
        yield ReplaceFile(record_file(known.gpu), old, new)
