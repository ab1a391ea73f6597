"""Reset: which methods a function has, why not the others, and what speaks against it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, Remedy, allow, blocker, refuse_if_any
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import Plan
from vfiomgr.engine.registry import plans, resolves
from vfiomgr.passthrough import guards
from vfiomgr.passthrough.requests import Reset, ResetCheckpoint
from vfiomgr.passthrough.steps import ChangeDriver, ResetFunction, SetResetMethod
from vfiomgr.pci.original_state import DriverState
from vfiomgr.pci.reset_capabilities import COMMON_RESETS, RESET_METHODS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.engine.step import Step
    from vfiomgr.passthrough.requests import Bind
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.pci.reset_capabilities import Offer, ResetMethod
    from vfiomgr.snapshot.model import HostSnapshot


_NAMED = 3
"""Neighbours to name; a bus may have hundreds."""
_UNREAD = "its configuration space was not read (it takes root, and a function that is awake)"
_HELD_BACK = "the function offers it, but reset_method leaves it out: by choice, or by a quirk"
_WORDS: dict[ResetMethod, dict[Offer, str]] = {
    "flr": {
        "absent": "no PCI Express capability",
        "no": "not offered (FLReset in its Device Capabilities is 0)",
        "yes": _HELD_BACK,
    },
    "af_flr": {
        "absent": "no Advanced Features capability",
        "no": "not offered by its Advanced Features",
        "yes": _HELD_BACK,
    },
    "pm": {
        "absent": "no power management capability",
        "no": "keeps its state (NoSoftRst)",
        "yes": _HELD_BACK,
    },
}
_OTHERS: dict[ResetMethod, str] = {
    "device_specific": "the kernel has no quirk for this device",
    "acpi": "the firmware has no _RST for it",
    "cxl_bus": "no CXL port is above it",
}


@plans(Reset)
def plan_reset(
    host: HostSnapshot, request: Reset, checkpoint: ResetCheckpoint | None = None
) -> Plan:
    """Reset a function; a method that is chosen for it is not kept.

    Raises:
        Refusal: a guard forbids it, or the function has no such method.
        UnknownDevice: the address names nothing.

    """
    device = host.device(request.address)
    refuse_if_any(
        [*_obstacles(host, device), *method_diagnostics(host, device, request.method)],
        request.allow,
    )
    now = " ".join(device.reset_method)
    said = host.resets_of(device)
    steps: tuple[Step, ...] = (ResetFunction(device.identity, said.kept if said else None),)
    after = (checkpoint.methods if checkpoint is not None else "") or now
    if request.method is not None and request.method != now:
        steps = (SetResetMethod(device.identity, before=now, after=request.method), *steps)
    if (request.method or now) != after:
        restored = SetResetMethod(device.identity, before=request.method or now, after=after)
        steps = (*steps, restored)
    methods = request.method or methods_in_words(host, device) or "what the kernel finds"
    return Plan(
        summary=f"reset {device.address} by {methods}",
        steps=steps,
        locks=(device_lock(device),),
        notes=tuple(_notes(device)),
    )


@resolves(Reset)
def resolve(
    host: HostSnapshot, request: Reset, checkpoint: ResetCheckpoint | None = None
) -> ResetCheckpoint:
    """Find the methods to restore."""
    if checkpoint is not None and checkpoint.methods:
        return checkpoint
    return ResetCheckpoint(" ".join(host.device(request.address).reset_method))


def working(host: HostSnapshot, device: PciDevice) -> tuple[str, ...]:
    """The methods of reset_method that would work, in the order in which the kernel tries them."""
    reasons = unavailable(host, device)
    return tuple(name for name in device.reset_method if name not in reasons)


def methods_in_words(host: HostSnapshot, device: PciDevice) -> str:
    """The methods that would work, as all commands name them: `flr, pm`."""
    return ", ".join(working(host, device))


def unavailable(host: HostSnapshot, device: PciDevice) -> dict[ResetMethod, str]:
    """The methods that would not work, each with the reason."""
    missing = {name: _why(host, device, name) for name in _missing(device)}
    if "bus" in device.reset_method and _neighbours(host, device):
        missing["bus"] = _why(host, device, "bus")
    return {name: missing[name] for name in RESET_METHODS if name in missing}


def method_diagnostics(
    host: HostSnapshot, device: PciDevice, method: ResetMethod | None
) -> Iterator[Diagnostic]:
    """What is to be said where a function cannot be reset so, or (None) cannot be at all."""
    reasons = unavailable(host, device)
    works = working(host, device)
    if method in works or (method is None and (works or not _tells_methods(host))):
        return
    told = [name for name in COMMON_RESETS if name in reasons]
    why = reasons[method] if method else "; ".join(f"{name}: {reasons[name]}" for name in told)
    yield blocker(
        "no-reset",
        device,
        f"{device} cannot be reset{f' by {method}' if method else ''}: {why}",
        f"it has {methods_in_words(host, device)}"
        if works
        else "give its whole slot to a guest, which resets it together, or power-cycle the host",
    )


def _tells_methods(host: HostSnapshot) -> bool:
    """Whether this kernel has reset_method at all, which came with Linux 5.15."""
    return any(device.reset_method for device in host.devices)


def _missing(device: PciDevice) -> list[ResetMethod]:
    return [name for name in RESET_METHODS if name not in device.reset_method]


def _why(host: HostSnapshot, device: PciDevice, method: ResetMethod) -> str:
    if method in _OTHERS:
        return _OTHERS[method]
    if method == "bus":
        return _why_no_bus(host, device)
    capabilities = host.resets_of(device)
    if capabilities is None:
        return _UNREAD
    offers: dict[ResetMethod, Offer] = {
        "flr": capabilities.flr,
        "af_flr": capabilities.af_flr,
        "pm": capabilities.pm,
    }
    return _WORDS[method][offers[method]]


def _why_no_bus(host: HostSnapshot, device: PciDevice) -> str:
    """What keeps pci_reset_bus_function from it."""
    if "/" not in device.bridge_path:
        return "a root bus cannot be reset"
    neighbours = _neighbours(host, device)
    if neighbours:
        named = ", ".join(str(d.address) for d in neighbours[:_NAMED])
        more = f" and {len(neighbours) - _NAMED} more" if len(neighbours) > _NAMED else ""
        return f"its bus carries {named}{more} too"
    return _HELD_BACK


def _neighbours(host: HostSnapshot, device: PciDevice) -> list[PciDevice]:
    """The other functions of its bus, which a bus reset would hit: the kernel answers ENOTTY."""
    here = (device.address.domain, device.address.bus)
    return [
        other
        for other in host.devices
        if other is not device
        and (other.address.domain, other.address.bus) == here
        and other.physical_function != device.address
    ]


def _obstacles(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    yield from guards.bridge(host, device)
    yield from guards.silence(host, device)
    yield from guards.stuck(host, device)
    for diagnostic in guards.held_by_guest(host, device):
        remedy = "shut the guest down or detach it from the guest first, or reset it in the guest"
        yield replace(diagnostic, remedies=(Remedy(remedy),), override=None)
    yield from guards.carries_vgpus(host, device)
    for diagnostic in guards.active_virtual_functions(host, device):
        remedy = f"reset one of them, or remove them: vfiomgr sriov set {device.address} 0"
        yield replace(diagnostic, remedies=(Remedy(remedy),))
    yield from guards.boot_display(host, device)
    yield from guards.open_nodes(host, device)
    for diagnostic in guards.host_use(host, device):
        if diagnostic.rule == guards.PERSISTENCE_MODE or diagnostic.override is None:
            yield diagnostic
        else:  # there is no --function-only
            remedies = (Remedy("end that first"), allow(diagnostic.override))
            yield replace(diagnostic, remedies=remedies)


def _notes(device: PciDevice) -> Iterator[str]:
    if device.driver is not None and not device.is_on_vfio:
        yield f"{device} stays on {device.driver}, which has to set it up again"


def state_of(device: PciDevice) -> DriverState:
    """What a function is like, with all that can be pinned."""
    return DriverState(
        device.driver,
        device.driver_override,
        device.power_control,
        " ".join(device.reset_method) or None,
        device.d3cold_allowed,
    )


def pinned(state: DriverState, device: PciDevice, request: Bind) -> DriverState:
    """A state with the pins: the way of reset for named functions alone, D3cold for the slot."""
    if request.reset_method is not None and device.address in request.addresses:
        state = replace(state, reset_method=request.reset_method)
    if request.no_d3cold and device.d3cold_allowed is not None:
        state = replace(state, d3cold_allowed=False)
    return state


def repin(device: PciDevice, request: Bind) -> ChangeDriver | None:
    """Pin a function that stays on its driver; None where it is as wanted."""
    now = state_of(device)
    target = pinned(now, device, request)
    return None if target == now else ChangeDriver(device.identity, now, target)


def unpinned(device: PciDevice, request: Bind) -> str:
    """What to say of a function that is bound already, and has no record to restore its pins."""
    if repin(device, request) is None:
        return ""
    return f", but not by vfiomgr, so it is not pinned: vfiomgr unbind {device.address} first"


def diagnostics(
    host: HostSnapshot, named: Sequence[PciDevice], request: Bind
) -> Iterator[Diagnostic]:
    """Named functions that cannot be reset in the way that is asked for."""
    if request.reset_method is not None:
        for device in named:
            yield from method_diagnostics(host, device, request.reset_method)
