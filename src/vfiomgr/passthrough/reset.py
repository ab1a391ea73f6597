"""Reset: the available methods of a function, and why a reset or a method is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, Override, Remedy, allow, blocker, refusal, refuse_if_any
from vfiomgr.engine.locks import device_lock
from vfiomgr.engine.plan import Plan, Step
from vfiomgr.engine.registry import plans, resolves
from vfiomgr.listing import listed
from vfiomgr.passthrough import guards
from vfiomgr.passthrough.bars import wanted_of
from vfiomgr.passthrough.steps import (
    BusFunction,
    ChangeDriver,
    Reset,
    ResetBus,
    ResetCheckpoint,
    ResetFunction,
    SetResetMethod,
)
from vfiomgr.pci.bars import BarSize
from vfiomgr.pci.capabilities import COMMON_RESETS, RESET_METHODS, Offer, ResetMethod
from vfiomgr.pci.drivers import DriverState, handles_resets
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.passthrough.steps import Bind
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


_QUIET_HOTPLUG = Version(6, 16)
"""The kernel whose hot-plug driver ignores the events of a bus reset."""
_NAMED = 3
"""Maximum number of neighbours to name; a bus may have hundreds."""
_UNREAD = "its configuration space was not read (requires root and an awake function)"
_HELD_BACK = "supported by the function, but not in reset_method (set by an administrator or quirk)"
_WORDS: dict[ResetMethod, dict[Offer, str]] = {
    "flr": {
        "absent": "no PCI Express capability",
        "no": "not supported (FLReset in its Device Capabilities is 0)",
        "yes": _HELD_BACK,
    },
    "af_flr": {
        "absent": "no Advanced Features capability",
        "no": "not supported by its Advanced Features",
        "yes": _HELD_BACK,
    },
    "pm": {
        "absent": "no power management capability",
        "no": "keeps its state (NoSoftRst)",
        "yes": _HELD_BACK,
    },
}
_BY_MODULE = "the kernel has no quirk; with vendor-reset loaded it may work when it is selected"
_OTHERS: dict[ResetMethod, str] = {
    "device_specific": "the kernel has no quirk for this device",
    "acpi": "the firmware has no _RST for it",
    "cxl_bus": "no CXL port above it",
}


LOST_BY_RESET = frozenset({"740f", "74a1", "75a3"})
"""AMD's Instinct MI300X (also reported with the ID of an MI210) and MI355X."""
LOST_SOURCE = "https://github.com/amd/MxGPU-Virtualization/issues/25"

_FAMILIES = {
    "Polaris 10": "67c0 67c1 67c2 67c4 67c7 67c8 67c9 67ca 67cc 67cf 67d0 67df 6fdf",
    "Polaris 11": "67e0 67e1 67e3 67e7 67e8 67e9 67eb 67ef 67ff",
    "Polaris 12": "6980 6981 6985 6986 6987 6995 6997 699f",
    "Vega 10": "6860 6861 6862 6863 6864 6867 6868 6869 686a 686b 686c 686d 686e 686f 687f",
    "Vega 20": "66a0 66a1 66a2 66a3 66a4 66a7 66af",
    "Arcturus (MI100)": "738c",
    "Navi 10": "7310 7312 7318 7319 731a 731b 731e 731f",
    "Navi 12": "7360 7362",
    "Navi 14": "7340 7341 7347 734f",
}
"""AMD GPUs that vendor-reset supports (its src/device-db.h, as of 2024)."""
VENDOR_RESET_GPUS = {number: name for name, ids in _FAMILIES.items() for number in ids.split()}
"""Device IDs that vendor-reset supports, with their families."""


@plans(Reset)
def plan_reset(
    host: HostSnapshot, request: Reset, checkpoint: ResetCheckpoint | None = None
) -> Plan:
    """Reset a function; a method chosen for it is used once.

    Raises:
        Refusal: a safety check forbids it, or the method is unavailable.
        UnknownDevice: the address is not found.
    """
    device = host.device(request.address)
    if request.with_bus:
        return _plan_bus(host, device, request.allow)
    refuse_if_any(
        [
            *_obstacles(host, device),
            *_driver_diagnostics(host, device),
            *method_diagnostics(host, device, request.method),
        ],
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
    methods = request.method or methods_in_words(host, device) or "the kernel's default method"
    return Plan(
        summary=f"reset {device.address} by {methods}",
        steps=steps,
        locks=(device_lock(device),),
        notes=tuple(_notes(device)),
    )


def _plan_bus(host: HostSnapshot, device: PciDevice, lifted: frozenset[Override]) -> Plan:
    """Reset the bus of a function by the bridge above; it need not have a method of its own.

    The kernel saves and restores the configuration space of all functions on and below the bus
    (__pci_reset_bus in drivers/pci/pci.c).
    """
    bridge = _bridge_above(host, device)
    if bridge is None:
        raise refusal([_no_bus_reset(device, "a root bus cannot be reset")])
    below = _below(host, bridge)
    refuse_if_any(
        [
            *guards.bridge(host, device),
            *_bus_diagnostics(host, device, bridge),
            *(each for one in below for each in _obstacles_with_bus(host, one)),
        ],
        lifted,
    )
    functions = [one for one in below if not one.is_bridge]
    said = {one.address: host.resets_of(one) for one in functions}
    kept = {address: found.kept if found else None for address, found in said.items()}
    return Plan(
        summary=f"reset {device.address} with its entire bus, by bridge {bridge.address}",
        steps=(
            ResetBus(
                bridge.identity,
                tuple(BusFunction(one.identity, kept[one.address]) for one in functions),
            ),
        ),
        locks=tuple(sorted({device_lock(one) for one in (bridge, *below)})),
        notes=(
            *(f"also resetting {one} (same bus)" for one in below if one is not device),
            *(note for one in functions for note in _lost_notes(one)),
            *_hotplug_notes(host, bridge),
        ),
    )


def _hotplug_notes(host: HostSnapshot, bridge: PciDevice) -> Iterator[str]:
    """Warn of pciehp, which took the reset for an unplugged device (pciehp_hpc.c)."""
    kernel = host.kernel.version
    if kernel is not None and kernel < _QUIET_HOTPLUG:
        yield (
            f"if {bridge.address} is a hot-plug port, Linux {kernel} may remove and find the "
            f"devices again, without driver_override (fixed in {_QUIET_HOTPLUG})"
        )


@resolves(Reset)
def resolve(
    host: HostSnapshot, request: Reset, checkpoint: ResetCheckpoint | None = None
) -> ResetCheckpoint:
    """Return the reset methods to restore."""
    if checkpoint is not None and checkpoint.methods:
        return checkpoint
    return ResetCheckpoint(" ".join(host.device(request.address).reset_method))


def working(host: HostSnapshot, device: PciDevice) -> tuple[str, ...]:
    """The usable methods of reset_method, in the order in which the kernel tries them."""
    reasons = unavailable(host, device)
    return tuple(name for name in device.reset_method if name not in reasons)


def methods_in_words(host: HostSnapshot, device: PciDevice) -> str:
    """The usable methods as text: `flr, pm`."""
    return ", ".join(working(host, device))


def unavailable(host: HostSnapshot, device: PciDevice) -> dict[ResetMethod, str]:
    """The unavailable methods, each with the reason."""
    missing = {name: _why(host, device, name) for name in _missing(device)}
    if "bus" in device.reset_method and _neighbours(host, device):
        missing["bus"] = _why(host, device, "bus")
    return {name: missing[name] for name in RESET_METHODS if name in missing}


def method_diagnostics(
    host: HostSnapshot, device: PciDevice, method: ResetMethod | None
) -> Iterator[Diagnostic]:
    """Refuse a method that is unavailable, or a function without any method (None)."""
    reasons = unavailable(host, device)
    works = working(host, device)
    if method in works or (method == "device_specific" and _may_have_module(device)):
        return
    if method is None and (works or not _tells_methods(host)):
        return
    told = [name for name in COMMON_RESETS if name in reasons]
    why = reasons[method] if method else "; ".join(f"{name}: {reasons[name]}" for name in told)
    yield blocker(
        "no-reset",
        device,
        f"{device} cannot be reset{f' by {method}' if method else ''}: {why}",
        f"use one of: {methods_in_words(host, device)}" if works else _without_method(host, device),
    )


def _may_have_module(device: PciDevice) -> bool:
    """Whether only a write shows that a module, vendor-reset, can reset a function.

    reset_method is filled when the kernel finds the function, so it lacks the method of a module
    loaded later; reset_method_store probes (drivers/pci/pci.c).
    """
    is_known = device.vendor_id == "1002" and device.device_id in VENDOR_RESET_GPUS
    return is_known and device.is_graphics_or_accelerator and bool(device.reset_method)


def _without_method(host: HostSnapshot, device: PciDevice) -> str:
    """The ways to reset a function that has no method of its own."""
    ways = "assign all functions of its slot to one guest, or power-cycle the host"
    if not _can_reset_bus(host, device):
        return ways
    return f"reset its entire bus: vfiomgr reset {device.address} --with-bus; or {ways}"


def _tells_methods(host: HostSnapshot) -> bool:
    """Whether this kernel has reset_method (since Linux 5.15)."""
    return any(device.reset_method for device in host.devices)


def _missing(device: PciDevice) -> list[ResetMethod]:
    return [name for name in RESET_METHODS if name not in device.reset_method]


def _why(host: HostSnapshot, device: PciDevice, method: ResetMethod) -> str:
    if method == "device_specific" and _may_have_module(device):
        return _BY_MODULE
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
    """Why pci_reset_bus_function refuses a bus reset."""
    if device.is_on_root_bus:
        return "a root bus cannot be reset"
    neighbours = _neighbours(host, device)
    if neighbours:
        names = [str(device.address) for device in neighbours]
        return f"its bus also has {listed(names, _NAMED)}"
    return _HELD_BACK


def _neighbours(host: HostSnapshot, device: PciDevice) -> list[PciDevice]:
    """The other functions of its bus, for which the kernel refuses a bus reset (ENOTTY)."""
    return [one for one in host.beside(device) if one.physical_function != device.address]


def _bridge_above(host: HostSnapshot, device: PciDevice) -> PciDevice | None:
    """The bridge whose secondary bus has a function; None on a root bus."""
    return host.device_named(device.bridge_path.rpartition("/")[2])


def _below(host: HostSnapshot, bridge: PciDevice) -> list[PciDevice]:
    """All functions on and below the secondary bus of a bridge."""
    path = f"{bridge.bridge_path}/{bridge.address}"
    return [one for one in host.devices if f"{one.bridge_path}/".startswith(f"{path}/")]


def _can_reset_bus(host: HostSnapshot, device: PciDevice) -> bool:
    bridge = _bridge_above(host, device)
    is_able = bridge is not None and bridge.address in (host.bus_resets or ())
    return is_able and not device.is_bridge


def _bus_diagnostics(
    host: HostSnapshot, device: PciDevice, bridge: PciDevice
) -> Iterator[Diagnostic]:
    """Refuse a bridge that cannot reset its bus."""
    if host.bus_resets is not None and bridge.address not in host.bus_resets:
        why = f"bridge {bridge.address} has no reset_subordinate (since Linux 6.13)"
        yield _no_bus_reset(device, why)


def _no_bus_reset(device: PciDevice, why: str) -> Diagnostic:
    return blocker(
        "no-reset",
        device,
        f"{device} cannot be reset with its bus: {why}",
        "assign all functions of its slot to one guest, or power-cycle the host",
    )


def _obstacles_with_bus(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse functions in use; virtual functions are refused with their physical function."""
    if device.is_bridge:
        yield from guards.silence(host, device)
        yield from guards.stuck(host, device)
    elif device.physical_function is None:
        yield from _obstacles(host, device)
        if device.driver is not None and not device.is_on_vfio:
            yield blocker(
                "bus-in-use",
                device,
                f"{device} is on {device.driver}, and a reset of its bus would reset it too",
                f"vfiomgr bind {device.address}",
            )


def _obstacles(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    yield from guards.bridge(host, device)
    yield from guards.silence(host, device)
    yield from guards.stuck(host, device)
    for diagnostic in guards.held_by_guest(host, device):
        remedy = "shut the guest down, detach the device, or reset it in the guest"
        yield replace(diagnostic, remedies=(Remedy(remedy),), override=None)
    yield from guards.held_by_pod(host, device)
    yield from guards.carries_vgpus(host, device)
    for diagnostic in guards.active_virtual_functions(host, device):
        remedy = f"reset one of them, or remove them: {guards.removal(device)}"
        yield replace(diagnostic, remedies=(Remedy(remedy),))
    yield from guards.boot_display(host, device)
    yield from guards.open_nodes(host, device)
    for diagnostic in guards.host_use(host, device):
        is_other = diagnostic.rule in (guards.PERSISTENCE_MODE, guards.UNKNOWN)
        if is_other or diagnostic.override is None:
            yield diagnostic
        else:  # there is no --function-only
            remedies = (Remedy("stop this use first"), allow(diagnostic.override))
            yield replace(diagnostic, remedies=remedies)


def _driver_diagnostics(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse a function on a host driver that does not handle the loss of the function's state."""
    driver = device.driver
    if driver is None or device.is_on_vfio or handles_resets(driver, host.kernel.version):
        return
    address = device.address
    yield blocker(
        "driver-without-reset",
        device,
        f"cannot reset {device}: its driver {driver} is not known to handle resets, and the "
        "device would stop working",
        f"bind the device to vfio-pci for the reset: vfiomgr bind {address}; "
        f"vfiomgr reset {address}; vfiomgr unbind {address}",
    )


def _notes(device: PciDevice) -> Iterator[str]:
    if device.driver is not None and not device.is_on_vfio:
        yield f"{device} remains bound to {device.driver}, which handles resets"
    yield from _lost_notes(device)


def _lost_notes(device: PciDevice) -> Iterator[str]:
    """Warn of physical functions that resets make unreachable; virtual ones are not affected."""
    is_known = device.vendor_id == "1002" and device.device_id in LOST_BY_RESET
    if is_known and device.is_graphics_or_accelerator and device.physical_function is None:
        yield (
            f"{device.address} may be lost by the reset, until the host reboots: its configuration "
            f"space then reads as all ones ({LOST_SOURCE})"
        )


def state_of(device: PciDevice, bars: Iterable[BarSize] = ()) -> DriverState:
    """The driver state of a function, with its reset and power settings.

    Also with the present sizes of the same BARs as `bars`.
    """
    indexes = {bar.index for bar in bars}
    return DriverState(
        device.driver,
        device.driver_override,
        device.power_control,
        " ".join(device.reset_method) or None,
        device.d3cold_allowed,
        tuple(BarSize(bar.index, bar.size) for bar in device.bars if bar.index in indexes),
    )


def pinned(state: DriverState, device: PciDevice, request: Bind) -> DriverState:
    """Add the requested pins: reset method and BARs of named functions, D3cold of all."""
    if wanted := wanted_of(device, request):
        state = replace(state, bars=wanted)
    if request.reset_method is not None and device.address in request.addresses:
        state = replace(state, reset_method=request.reset_method)
    if request.no_d3cold and device.d3cold_allowed is not None:
        state = replace(state, d3cold_allowed=False)
    return state


def repin(device: PciDevice, request: Bind) -> ChangeDriver | None:
    """Pin a function that stays on its driver; None if nothing changes."""
    now = state_of(device, wanted_of(device, request))
    target = pinned(now, device, request)
    return None if target == now else ChangeDriver(device.identity, now, target)


def unpinned(device: PciDevice, request: Bind) -> str:
    """Explain that a bound function without saved state cannot be pinned."""
    if repin(device, request) is None:
        return ""
    return f", but not by vfiomgr; to pin it, first run: vfiomgr unbind {device.address}"


def diagnostics(
    host: HostSnapshot, named: Sequence[PciDevice], request: Bind
) -> Iterator[Diagnostic]:
    """Refuse named functions for which the requested reset method is unavailable."""
    if request.reset_method is not None:
        for device in named:
            yield from method_diagnostics(host, device, request.reset_method)
