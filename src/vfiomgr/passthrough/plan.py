"""Plans to bind and unbind functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.desktop.card import is_display, is_of_desktop
from vfiomgr.desktop.plan import lock_for, record_of, returning_steps
from vfiomgr.desktop.steps import RecordRelease
from vfiomgr.diagnostic import Option, Remedy, refuse_if_any
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import FIRST, LAST, Plan, distinct
from vfiomgr.engine.registry import device_notes, plans
from vfiomgr.errors import UsageError
from vfiomgr.expressions import expression
from vfiomgr.passthrough import bars, guards, reset
from vfiomgr.passthrough.bars import wanted_of
from vfiomgr.passthrough.isolation import why_together
from vfiomgr.passthrough.release import plan_released
from vfiomgr.passthrough.steps import (
    AwaitVfioNode,
    Bind,
    ChangeDriver,
    DropOriginalState,
    ReleaseDriver,
    SaveOriginalState,
    Unbind,
)
from vfiomgr.paths import PCI_DRIVERS_PROBE, echo
from vfiomgr.pci.drivers import (
    PLAIN,
    DriverState,
    OriginalState,
    best_variant,
    is_variant_module,
    parse_pci_ids,
)
from vfiomgr.pci.model import is_vfio_driver
from vfiomgr.pci.slots import chipset_role
from vfiomgr.persistence import installed_layout
from vfiomgr.persistence import plan as persistence_plan
from vfiomgr.persistence.steps import LoadModule
from vfiomgr.persistence.systems import lost_rules, why_lost
from vfiomgr.snapshot.hardware import gets_group_late

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Sequence

    from vfiomgr.diagnostic import Diagnostic
    from vfiomgr.engine.plan import Step
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

    Drivers = dict[PciAddress, LoadModule]

_OF_PROCESSES = frozenset({"in-use", "held-by-guest", guards.PERSISTENCE_MODE})
_UNKNOWN_OF_PROCESSES = frozenset({"processes", "open-files", guards.PERSISTENCE_MODE})
"""Kinds of unknown users."""


def ends_at_reboot(host: HostSnapshot, diagnostic: Diagnostic) -> bool:
    """Whether a reboot removes the reason of a refusal: processes, except those of a pod.

    A pod keeps its devices across a reboot, even if it has not opened them.
    """
    name = diagnostic.subject.partition(" ")[0]
    in_pod = host.users.agent is not None and name in {
        *host.users.agent.pods,
        *host.users.agent.claimed,
    }
    unknown = {
        each.kind
        for each in host.users.unknown
        if diagnostic.rule == guards.UNKNOWN and diagnostic.summary.endswith(f": {each.why}")
    }
    is_of_processes = bool(unknown) and unknown <= _UNKNOWN_OF_PROCESSES
    return (diagnostic.rule in _OF_PROCESSES or is_of_processes) and not in_pod


def reasons_to_refuse(
    host: HostSnapshot, request: Bind, targets: Sequence[PciDevice], found: list[Diagnostic]
) -> list[Diagnostic]:
    """The reasons to refuse a bind, with --release and --at-boot as remedies of a bind now."""
    if not request.at_boot and is_of_desktop(host, targets):
        (card, *_) = filter(is_display, targets)
        release = Remedy(f"have the desktop release it: vfiomgr bind --release {card.address}")
        found = [
            replace(one, remedies=(*one.remedies, release)) if one.rule == "in-use" else one
            for one in found
        ]
    ending = [one for one in found if ends_at_reboot(host, one)]
    later = [one for one in found if one not in ending]
    if request.at_boot:
        return later
    is_pinned = request.reset_method is not None or request.no_d3cold or bool(request.bars)
    if is_pinned or any(one.override not in request.allow for one in later):
        return found
    is_in_place = all(host.files.binding(device.address) is not None for device in targets)
    if is_in_place or why_lost(host.files):
        return found
    way = Remedy("bind it at the next boot: ", Option("at-boot", _command(request)))
    return [replace(one, remedies=(*one.remedies, way)) if one in ending else one for one in found]


def _command(request: Bind) -> str:
    """The command that binds the same functions in the same way at the next boot."""
    words = ["vfiomgr bind --at-boot", *map(str, request.addresses)]
    if request.driver is not None:
        words.append(f"--driver {request.driver}")
    if request.only:
        words.append("--function-only")
    if request.with_group:
        words.append("--with-group")
    if request.owner is not None:
        words.append(f"--owner {request.owner.name}")
    words += [f"--allow {name}" for name in sorted(request.allow)]
    if request.update_initramfs:
        words.append("--update-initramfs")
    return " ".join(words)


_FUNCTION_ONLY = Option("function-only", "--function-only")
_WITH_GROUP = Option("unbind-group", "--with-group")

_NONE: frozenset[PciAddress] = frozenset()
_DRIVER_NAME = expression(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@plans(Bind)
def plan_bind(
    host: HostSnapshot,
    request: Bind,
    going: frozenset[PciAddress] = _NONE,
    others: frozenset[PciAddress] = _NONE,
) -> Plan:
    """Bind functions, with the other functions of their slots, to a VFIO driver.

    With `release`, the desktop releases the displays among them first.

    `going` are functions that other plans bind at the same time; `others` are functions that other
    plans handle, which this plan does not include.

    Raises:
        Refusal: a safety check forbids it.
        UsageError: an address or the driver is not found.
    """
    _check_driver(host, request.driver)
    if request.release:
        targets = [host.device(address) for address in drivers_for(host, request, others)]
        # A card that sleeps too deeply (D3cold) on vfio-pci may not come back.
        awake = request.no_d3cold or any(map(is_display, targets))
        plain = replace(request, release=False, no_d3cold=awake)
        return plan_released(host, request, targets, lambda seen: plan_bind(seen, plain))
    named = [host.device(address) for address in request.addresses]
    wanted = drivers_for(host, request, others)
    targets = [host.device(address) for address in wanted]
    moving = [device for device in targets if device.driver != wanted[device.address].driver]
    found = [
        *guards.missing_driver(host, (wanted[device.address].driver for device in moving)),
        *_taking(host, named, moving, request),
        *guards.foreign_members(host, targets, request, going),
        *reset.diagnostics(host, named, request),
        *bars.diagnostics(host, named, request),
        *(_against_rules(host, targets) if request.persist else ()),
    ]
    refuse_if_any(reasons_to_refuse(host, request, targets, found), request.allow)
    staying = [device for device in targets if device not in moving]
    now, pending = ([], moving) if request.at_boot else (moving, [])
    repinned = dict(_repinned(host, staying, request))
    kept = persistence_plan.part_of_bind(host, wanted, now, request)
    steps: list[Step] = [
        *_loading(host, now, wanted),
        *(step for d in now for step in _take(host, d, wanted[d.address].driver, request)),
        *repinned.values(),
        *_awaiting(host, now),
        *(persistence_plan.marked_as_swept(host) if pending and kept.steps else ()),
        *kept.steps,
    ]
    drivers = dict.fromkeys(wanted[device.address].driver for device in named)
    summary = f"bind {_listed(named)} to {' and '.join(drivers)}"
    return Plan(
        summary=f"{summary} at the next boot" if request.at_boot else summary,
        steps=tuple(steps),
        parallel_groups=_parallel_groups(host, steps),
        resolves=tuple(str(device.address) for device in targets if device not in pending),
        locks=(*_locks(targets), *kept.locks),
        notes=distinct(
            [
                *_companion_notes(host, "binding", named, targets, now),
                *_companion_notes(host, "binding at the next boot:", named, targets, pending),
                *(f"{d.address} stays on {d.driver or 'no driver'} until reboot" for d in pending),
                *(
                    f"{one.summary}; remedy: {one.without('allow').hint}"
                    for device in targets
                    for one in guards.unusable(host, device)
                ),
                *kept.notes,
            ]
        ),
        alternatives=() if request.with_group else _alone(host, named, moving),
        already=(*_already(request, staying, repinned), *kept.already),
    )


def _taking(
    host: HostSnapshot, named: Sequence[PciDevice], moving: Sequence[PciDevice], request: Bind
) -> Iterator[Diagnostic]:
    """The reasons not to take functions; only those of other groups can be left out."""
    groups = {device.iommu_group for device in named} - {None}
    bound = {str(d): d for d in moving if d in named or d.iommu_group in groups}
    for found in guards.taking(host, moving):
        device, rest = bound.get(found.subject), found.without("only")
        if device is None or rest == found:
            yield found
        elif device in named or request.with_group:
            yield rest
        else:
            yield replace(rest, why=why_together(host, device.iommu_group))


def _against_rules(host: HostSnapshot, targets: Sequence[PciDevice]) -> Iterator[Diagnostic]:
    """The reasons against rules that apply at each boot."""
    yield from installed_layout.diagnostics(host, targets)
    yield from lost_rules(host, targets)


def _already(
    request: Bind, staying: Iterable[PciDevice], repinned: Container[PciAddress]
) -> Iterator[str]:
    """The functions that need no change."""
    for device in staying:
        if device.address not in repinned:
            yield f"{device} is already on {device.driver}{reset.unpinned(device, request)}"


def _repinned(
    host: HostSnapshot, staying: Iterable[PciDevice], request: Bind
) -> Iterator[tuple[PciAddress, Step]]:
    """New settings of functions that stay on their driver and that vfiomgr had bound."""
    for device in staying:
        step = reset.repin(device, request)
        if step is not None and host.origin(device) is not None:
            yield device.address, step


def _loading(host: HostSnapshot, moving: Iterable[PciDevice], wanted: Drivers) -> Iterable[Step]:
    """The modules of drivers that are not loaded, without duplicates."""
    choices = (wanted[device.address] for device in moving)
    return dict.fromkeys(choice for choice in choices if choice.driver not in host.pci_drivers)


def _awaiting(host: HostSnapshot, moving: Sequence[PciDevice]) -> Iterable[Step]:
    """Wait for the node of each group, with the first of its functions."""
    first = {d.iommu_group: d for d in reversed(moving) if d.iommu_group is not None}
    later = [d for d in moving if gets_group_late(host, d)]
    has_groups = host.vfio.has_groups is not False
    return [
        *(AwaitVfioNode(number, first[number].identity, has_groups) for number in sorted(first)),
        *(AwaitVfioNode(None, device.identity, has_groups) for device in later),
    ]


def drivers_for(
    host: HostSnapshot, request: Bind, others: frozenset[PciAddress] = _NONE
) -> Drivers:
    """The VFIO driver of each function of a bind, with the other functions of the slots."""
    return {
        d.address: _wanted_driver(host, d, request.driver) for d in moved_by(host, request, others)
    }


def moved_by(
    host: HostSnapshot, request: Bind | Unbind, others: frozenset[PciAddress] = _NONE
) -> list[PciDevice]:
    """The named functions, the rest of their devices, and on request the rest of their groups.

    Named bridges and functions of the chipset stay in the list, so that a safety check refuses
    them; others are left out, unless they are on VFIO.
    """
    named = [host.device(address) for address in request.addresses]
    found = {device.address: device for device in named}
    companions: list[PciDevice] = []
    if not request.only:
        companions += [other for device in named for other in host.slot(device)]
    if request.with_group:
        groups = {d.iommu_group for d in (*named, *companions)}
        companions += [other for n in groups for other in host.group_members(n)]
    gone = {one.address for device in (*named, *companions) for one in host.behind(device)}
    for other in companions:
        if goes_along(other) and other.address not in others | gone:
            found[other.address] = other
    return [found[address] for address in sorted(found)]


def goes_along(device: PciDevice) -> bool:
    """Whether a function that is not named is moved with others."""
    return not device.is_bridge and (device.is_on_vfio or chipset_role(device) is None)


@plans(Unbind)
def plan_unbind(host: HostSnapshot, request: Unbind) -> Plan:
    """Return functions to their original drivers, with driver_override and power control.

    Raises:
        Refusal: a guest uses one of them.
        UnknownDevice: an address is not found.
    """
    named = [host.device(address) for address in request.addresses]
    targets = moved_by(host, request)
    staying = dict(_staying(host, targets))
    left = [device for members in staying.values() for device in members]
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
    returning = tuple(returning_steps(host, targets))
    steps += [*kept.steps, *returning]
    return Plan(
        summary=f"unbind {_listed(named)}",
        steps=tuple(steps),
        parallel_groups=_parallel_groups(host, steps),
        resolves=tuple(str(device.address) for device in targets),
        locks=(*_locks(targets), *kept.locks, *lock_for(returning)),
        notes=distinct(
            [
                *_companion_notes(host, "unbinding", named, targets, moving),
                *(f"still on VFIO in IOMMU group {n}: {_listed(on)}" for n, on in staying.items()),
                *device_notes(host, moving),
                *_still_listed(host, moving),
                *(
                    f"{d} has driver_override {d.driver_override} and no driver; have the kernel "
                    f"bind it: {echo(str(d.address), PCI_DRIVERS_PROBE)}"
                    for d in filter(host.awaits_probe, targets)
                ),
                *kept.notes,
            ]
        ),
        alternatives=(Remedy(f"to unbind {_listed(left)} too: ", _WITH_GROUP),) if left else (),
        already=tuple(
            f"{d} is already on {d.driver or 'no driver'}" for d in targets if d not in moving
        ),
    )


def _still_listed(host: HostSnapshot, moving: Sequence[PciDevice]) -> Iterator[str]:
    """The functions that `ids=` of vfio-pci matches, with the setting that is in force."""
    facts, line = host.readiness, host.kernel.command_line
    for one in () if facts is None else facts.parameter(line, "vfio_pci", "ids"):
        entries = [entry for _, entry in parse_pci_ids(one.value) if entry and not one.ignored]
        taken = [d for d in moving if d.driver == PLAIN and any(e.matches(d) for e in entries)]
        if taken:
            yield f"at the next boot vfio-pci may bind {_listed(taken)} again: {one.place}"


_NO_DRIVER = Option("not-driver", "leave out --driver")
_ONLY_MODULES = frozenset({"vfio", "vfio_iommu_type1", "vfio_pci_core", "vfio_virqfd"})
"""Modules of VFIO that register no driver."""


def _check_driver(host: HostSnapshot, driver: str | None) -> None:
    """Check that a driver is a VFIO driver of this kernel, as far as the host shows."""
    if driver is None:
        return
    if not _DRIVER_NAME.fullmatch(driver):
        message = f"invalid driver name: {driver!r}"
        raise UsageError(message, Remedy("", _NO_DRIVER, " to use vfio-pci"))
    if not is_vfio_driver(driver) or driver.replace("-", "_") in _ONLY_MODULES:
        message = f"{driver} is not a VFIO driver"
        then = " to use vfio-pci, or name a variant of it"
        raise UsageError(message, Remedy("", _NO_DRIVER, then))
    if not _has_driver(host, driver):
        message = f"driver not found: {driver} (this kernel has no module of that name)"
        import difflib  # noqa: PLC0415 - slow to import

        nearest = difflib.get_close_matches(driver, _vfio_drivers(host), n=3, cutoff=0)
        raise UsageError(message, f"did you mean {' or '.join(nearest or [PLAIN])}?")


def _has_driver(host: HostSnapshot, driver: str) -> bool:
    """Whether the driver is loaded or may come from a module; True if unknown."""
    if host.vfio_modules is None or driver in (PLAIN, *host.pci_drivers):
        return True
    brought = (variant.driver_name for variant in host.variants)
    return driver.replace("-", "_") in host.vfio_modules or driver in brought


def _vfio_drivers(host: HostSnapshot) -> list[str]:
    """The VFIO drivers that this kernel has or can load (no aliases before Linux 5.16)."""
    modules = [name for name in host.vfio_modules or () if is_variant_module(name)]
    variants = [variant.driver_name for variant in host.variants]
    loaded = [name for name in host.pci_drivers if is_vfio_driver(name)]
    return list({n.replace("-", "_"): n for n in (*modules, *variants, *loaded, PLAIN)}.values())


def _wanted_driver(host: HostSnapshot, device: PciDevice, asked: str | None) -> LoadModule:
    """The target driver of a function, and its module.

    The requested driver; if none is requested, the function's current VFIO driver, its best
    matching variant driver, or vfio-pci.
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
    """Assign a parallel group to each IOMMU group; modules come first, files and units last.

    So does the record of a display: as long as it is there, the next `unbind` starts the units.
    Functions whose IOMMU group is not known yet may share one with any other: with them, one
    function is moved after the other, and their groups are examined when all are moved.
    """
    steps = tuple(steps)
    moved = (host.device_named(step.subject or "") for step in steps)
    is_in_order = any(device is not None and gets_group_late(host, device) for device in moved)
    numbers: dict[int | str, int] = {}
    found: list[int] = []
    for step in steps:
        name = step.subject
        if name is None or isinstance(step, RecordRelease):
            found.append(FIRST if isinstance(step, LoadModule) else LAST)
            continue
        device = host.device_named(name)
        group = None if device is None else device.iommu_group
        key = "" if is_in_order else name if group is None else group
        found.append(numbers.setdefault(key, len(numbers) + 1))
    return tuple(found)


def _take(host: HostSnapshot, device: PciDevice, driver: str, request: Bind) -> Iterable[Step]:
    before = reset.state_of(device, wanted_of(device, request))
    if host.origin(device) is None or _is_elsewhere(host, device):
        first = before
        if device.driver and device.driver_override not in (None, device.driver):
            # A rule set this override after the driver bound; restoring it would block the driver.
            first = replace(before, driver_override=None)
        yield SaveOriginalState(
            OriginalState(device.identity, first, device.driver_module, host.kernel.boot_id or "")
        )
    target = DriverState(driver, driver)
    yield ChangeDriver(device.identity, before, reset.pinned(target, device, request))


def _is_elsewhere(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether another tool moved a recorded function to a host driver, so the record is outdated.

    False for a function that an interrupted run left between its original driver and VFIO.
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
    origin = host.origin(device)
    before = reset.state_of(device, () if origin is None else origin.state.bars)
    if origin is None:
        yield ReleaseDriver(device.identity, before)
        return
    driver = origin.state.driver
    if driver is not None and driver not in host.pci_drivers and origin.driver_module:
        yield LoadModule(origin.driver_module, driver)
    if not origin.state.is_met_by(before):
        is_released = record_of(host, device.address) is not None
        yield ChangeDriver(device.identity, before, origin.state, may_scan=is_released)
    yield DropOriginalState(origin)


def _locks(devices: Iterable[PciDevice]) -> tuple[str, ...]:
    return tuple(sorted(set(map(device_lock, devices))))


def _companion_notes(
    host: HostSnapshot,
    verb: str,
    named: Sequence[PciDevice],
    targets: Sequence[PciDevice],
    moving: Sequence[PciDevice],
) -> Iterable[str]:
    """The functions that are not named."""
    along = _along(host, named)
    for device in targets:
        if device not in named and device in moving:
            why = "same slot" if device in along else f"IOMMU group {device.iommu_group}"
            yield f"also {verb} {device} ({why})"


def _along(host: HostSnapshot, named: Iterable[PciDevice]) -> list[PciDevice]:
    """All functions of the named devices."""
    return [other for device in named for other in host.slot(device)]


def _alone(
    host: HostSnapshot, named: Sequence[PciDevice], moving: Sequence[PciDevice]
) -> tuple[Remedy, ...]:
    """How to leave functions of a named device that are in other groups."""
    groups = {(device.address.slot, device.iommu_group) for device in named}
    others = [d for d in moving if d in _along(host, named)]
    others = [d for d in others if (d.address.slot, d.iommu_group) not in groups]
    return (Remedy(f"to leave {_listed(others)}: ", _FUNCTION_ONLY),) if others else ()


def _staying(
    host: HostSnapshot, targets: Sequence[PciDevice]
) -> Iterator[tuple[int, list[PciDevice]]]:
    """The functions that stay on VFIO, by their IOMMU groups."""
    for number in sorted({d.iommu_group for d in targets if d.iommu_group is not None}):
        staying = [d for d in host.group_members(number) if d.is_on_vfio and d not in targets]
        if staying:
            yield number, staying


def _listed(devices: Sequence[PciDevice]) -> str:
    return ", ".join(dict.fromkeys(str(device.address) for device in devices))
