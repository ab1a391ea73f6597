"""Things that belong together, since they have something in common."""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from vfiomgr.diagnostic import Option, Remedy, refuse_if_any
from vfiomgr.engine.load_module import LoadModule
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import FIRST, LAST, Plan
from vfiomgr.engine.registry import device_notes, plans
from vfiomgr.errors import UsageError
from vfiomgr.passthrough import guards, reset
from vfiomgr.passthrough.requests import Bind, Unbind
from vfiomgr.passthrough.steps import (
    AwaitVfioNode,
    ChangeDriver,
    DropOriginalState,
    ReleaseDriver,
    SaveOriginalState,
)
from vfiomgr.pci.model import is_vfio_driver
from vfiomgr.pci.original_state import DriverState, OriginalState
from vfiomgr.pci.vfio_drivers import PLAIN, best_variant
from vfiomgr.persistence import plan as persistence_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from vfiomgr.engine.step import Step
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

    Drivers = dict[PciAddress, LoadModule]


_Thing = TypeVar("_Thing")


def components(
    things: Iterable[_Thing], keys_of: Callable[[_Thing], Iterable[Hashable]]
) -> list[list[_Thing]]:
    """Batches of things that share a key, directly or through others; in their first order."""
    leader: dict[Hashable, Hashable] = {}

    def find(key: Hashable) -> Hashable:
        root = key
        while leader.setdefault(root, root) != root:
            root = leader[root]
        while leader[key] != root:
            leader[key], key = root, leader[key]
        return root

    placed: list[tuple[_Thing, Hashable]] = []
    for number, thing in enumerate(things):
        first: Hashable = ("thing", number)
        for key in keys_of(thing):
            leader[find(key)] = find(first)
        placed.append((thing, first))
    batches: dict[Hashable, list[_Thing]] = {}
    for thing, first in placed:
        batches.setdefault(find(first), []).append(thing)
    return list(batches.values())


_NONE: frozenset[PciAddress] = frozenset()
_DRIVER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@plans(Bind)
def plan_bind(
    host: HostSnapshot,
    request: Bind,
    going: frozenset[PciAddress] = _NONE,
    others: frozenset[PciAddress] = _NONE,
) -> Plan:
    """Put functions and their companions on a VFIO driver.

    `going` are functions that other plans give to guests at the same time, `others` those that do
    not come along since other plans are about them.

    Raises:
        Refusal: a guard forbids it.
        UsageError: an address names nothing, or the driver's name is none.

    """
    _check_driver(host, request.driver)
    named = [host.device(address) for address in request.addresses]
    wanted = drivers_for(host, request, others)
    targets = [host.device(address) for address in wanted]
    moving = [device for device in targets if device.driver != wanted[device.address].driver]
    refuse_if_any(
        [
            *guards.taking(host, moving),
            *guards.foreign_members(host, targets, request, going),
            *reset.diagnostics(host, named, request),
            *(persistence_plan.diagnostics(host, targets) if request.persist else ()),
        ],
        request.allow,
    )
    drivers = [wanted[device.address].driver for device in named]
    staying = [d for d in targets if d not in moving and host.origin(d) is not None]
    repinned = {d.address: step for d in staying if (step := reset.repin(d, request))}
    kept = persistence_plan.part_of_bind(host, wanted, moving, request)
    steps: list[Step] = [
        *_loading(host, moving, wanted),
        *(step for d in moving for step in _take(host, d, wanted[d.address].driver, request)),
        *repinned.values(),
        *_awaiting(moving),
        *kept.steps,
    ]
    on_it = (
        f"{d} is on {d.driver} already{reset.unpinned(d, request)}"
        for d in targets
        if d not in moving and d.address not in repinned
    )
    return Plan(
        summary=f"bind {_listed(named)} to {' and '.join(dict.fromkeys(drivers))}",
        steps=tuple(steps),
        parallel_groups=_parallel_groups(host, steps),
        resolves=tuple(str(device.address) for device in targets),
        locks=(*_locks(targets), *kept.locks),
        notes=(*_companion_notes(named, targets, moving), *kept.notes),
        already=(*on_it, *kept.already),
    )


def _loading(host: HostSnapshot, moving: Iterable[PciDevice], wanted: Drivers) -> Iterable[Step]:
    """The modules of drivers that are not there, each once."""
    choices = (wanted[device.address] for device in moving)
    return dict.fromkeys(choice for choice in choices if choice.driver not in host.pci_drivers)


def _awaiting(moving: Sequence[PciDevice]) -> Iterable[Step]:
    """The node of each group, by the first of its functions."""
    first = {d.iommu_group: d for d in reversed(moving) if d.iommu_group is not None}
    return [AwaitVfioNode(number, first[number].identity) for number in sorted(first)]


def drivers_for(
    host: HostSnapshot, request: Bind, others: frozenset[PciAddress] = _NONE
) -> Drivers:
    """The VFIO driver of each function that a bind is about, with those that come along."""
    return {
        d.address: _wanted_driver(host, d, request.driver) for d in moved_by(host, request, others)
    }


def moved_by(
    host: HostSnapshot, request: Bind | Unbind, others: frozenset[PciAddress] = _NONE
) -> list[PciDevice]:
    """The named functions, the rest of their slots, and on request of their groups.

    A bridge that somebody named stays in the list, for a guard to refuse; others never come along.
    """
    named = [host.device(address) for address in request.addresses]
    found = {device.address: device for device in named}
    companions: list[PciDevice] = []
    if not request.only:
        companions += [other for device in named for other in host.slot(device)]
    if request.with_group:
        groups = {d.iommu_group for d in (*named, *companions)}
        companions += [other for n in groups for other in host.group_members(n)]
    for other in companions:
        if not other.is_bridge and other.address not in others:
            found[other.address] = other
    return [found[address] for address in sorted(found)]


@plans(Unbind)
def plan_unbind(host: HostSnapshot, request: Unbind) -> Plan:
    """Give functions back to the drivers that they had, with override and power control.

    Raises:
        Refusal: a guest holds one of them.
        UnknownDevice: an address names nothing.

    """
    named = [host.device(address) for address in request.addresses]
    targets = moved_by(host, request)
    recorded = [d for d in targets if host.origin(d) is not None]
    moving = [d for d in targets if d.is_on_vfio or (d in recorded and not _is_elsewhere(host, d))]
    refuse_if_any(guards.releasing(host, moving), request.allow)
    steps: list[Step] = [*persistence_plan.revoke_access(host, moving)]
    for device in targets:
        if device in moving:
            steps += _give_back(host, device)
        elif (origin := host.origin(device)) is not None:
            steps.append(DropOriginalState(origin))
    kept = persistence_plan.part_of_unbind(host, targets, request)
    steps += kept.steps
    return Plan(
        summary=f"give {_listed(named)} back to the host",
        steps=tuple(steps),
        parallel_groups=_parallel_groups(host, steps),
        resolves=tuple(str(device.address) for device in targets),
        locks=(*_locks(targets), *kept.locks),
        notes=(
            *_companion_notes(named, targets, moving),
            *_staying_notes(host, targets),
            *device_notes(host, moving),
            *kept.notes,
        ),
        already=tuple(
            f"{d} is with the host already, on {d.driver or 'no driver'}"
            for d in targets
            if d not in moving
        ),
    )


_NO_DRIVER = Option("not-driver", "leave out --driver")


def _check_driver(host: HostSnapshot, driver: str | None) -> None:
    """Make sure that a driver is one of VFIO that this kernel has, as far as can be seen."""
    if driver is None:
        return
    if not _DRIVER_NAME.fullmatch(driver):
        message = f"{driver!r} is no name of a driver"
        raise UsageError(message, Remedy("", _NO_DRIVER, " to get vfio-pci"))
    if not is_vfio_driver(driver):
        message = f"{driver} is no VFIO driver, so no guest could take the device from it"
        then = " to get vfio-pci, or name a variant of it"
        raise UsageError(message, Remedy("", _NO_DRIVER, then))
    if not _has_driver(host, driver):
        message = f"this kernel has no driver {driver}, and no module of that name"
        nearest = difflib.get_close_matches(driver, _vfio_drivers(host), n=3, cutoff=0)
        raise UsageError(message, f"did you mean {' or '.join(nearest or [PLAIN])}?")


def _has_driver(host: HostSnapshot, driver: str) -> bool:
    """Whether it is loaded, or may be the driver of a module; True where nobody knows."""
    if host.vfio_modules is None or driver in (PLAIN, *host.pci_drivers):
        return True
    brought = (variant.driver_name for variant in host.variants)
    return driver.replace("-", "_") in host.vfio_modules or driver in brought


def _vfio_drivers(host: HostSnapshot) -> list[str]:
    """The VFIO drivers that this kernel has or can load; kernels before 5.16 have no aliases."""
    modules = [name for name in host.vfio_modules or () if name.endswith("_vfio_pci")]
    variants = [variant.driver_name for variant in host.variants]
    loaded = [name for name in host.pci_drivers if is_vfio_driver(name)]
    return list({n.replace("-", "_"): n for n in (*modules, *variants, *loaded, PLAIN)}.values())


def _wanted_driver(host: HostSnapshot, device: PciDevice, asked: str | None) -> LoadModule:
    """The driver that a function shall have, and its module.

    The one that is asked for; else the VFIO driver that has it already, the variant that fits
    it best, or vfio-pci.
    """
    if asked is not None:
        return LoadModule(asked, asked)
    if device.driver is not None and device.is_on_vfio:
        return LoadModule(device.driver_module or device.driver, device.driver)
    variant = best_variant(host.variants, device.modalias)
    if variant is not None:
        return LoadModule(variant.module, variant.driver_name)
    return LoadModule(PLAIN, PLAIN)


def _parallel_groups(host: HostSnapshot, steps: Iterable[Step]) -> tuple[int, ...]:
    """One parallel group for each IOMMU group; modules come first, files last."""
    numbers: dict[int | str, int] = {}
    found: list[int] = []
    for step in steps:
        name = step.subject
        if name is None:
            found.append(FIRST if isinstance(step, LoadModule) else LAST)
            continue
        device = host.device_named(name)
        group = None if device is None else device.iommu_group
        found.append(numbers.setdefault(name if group is None else group, len(numbers) + 1))
    return tuple(found)


def _take(host: HostSnapshot, device: PciDevice, driver: str, request: Bind) -> Iterable[Step]:
    before = reset.state_of(device)
    if host.origin(device) is None or _is_elsewhere(host, device):
        first = before
        if device.driver and device.driver_override not in (None, device.driver):
            # A rule came after the driver; with this override nobody could give it back.
            first = replace(before, driver_override=None)
        yield SaveOriginalState(
            OriginalState(device.identity, first, device.driver_module, host.boot_id or "")
        )
    target = DriverState(driver, driver)
    yield ChangeDriver(device.identity, before, reset.pinned(target, device, request))


def _is_elsewhere(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether somebody moved a recorded function to a host driver since: the record is history.

    Half-way between its first driver and VFIO, where a run was cut off, it is not.
    """
    origin = host.origin(device)
    if origin is None or device.driver is None or device.is_on_vfio:
        return False
    first = origin.state
    if device.driver != first.driver:
        return True
    half_way = device.driver_override is not None and "vfio" in device.driver_override
    return device.driver_override != first.driver_override and not half_way


def _give_back(host: HostSnapshot, device: PciDevice) -> Iterable[Step]:
    before = reset.state_of(device)
    origin = host.origin(device)
    if origin is None:
        yield ReleaseDriver(device.identity, before)
        return
    driver = origin.state.driver
    if driver is not None and driver not in host.pci_drivers and origin.driver_module:
        yield LoadModule(origin.driver_module, driver)
    if not origin.state.is_met_by(before):
        yield ChangeDriver(device.identity, before, origin.state)
    yield DropOriginalState(origin)


def _locks(devices: Iterable[PciDevice]) -> tuple[str, ...]:
    return tuple(sorted(set(map(device_lock, devices))))


def _companion_notes(
    named: Sequence[PciDevice], targets: Sequence[PciDevice], moving: Sequence[PciDevice]
) -> Iterable[str]:
    slots = {device.address.slot for device in named}
    for device in targets:
        if device in named or device not in moving:
            continue
        why = "same slot" if device.address.slot in slots else f"IOMMU group {device.iommu_group}"
        yield f"{device} comes along: {why}"


def _staying_notes(host: HostSnapshot, targets: Sequence[PciDevice]) -> Iterable[str]:
    for number in sorted({d.iommu_group for d in targets if d.iommu_group is not None}):
        staying = [d for d in host.group_members(number) if d.is_on_vfio and d not in targets]
        if staying:
            yield (
                f"{_listed(staying)} of IOMMU group {number} stay with the guests: "
                "--with-group gives them back too"
            )


def _listed(devices: Sequence[PciDevice]) -> str:
    return ", ".join(dict.fromkeys(str(device.address) for device in devices))
