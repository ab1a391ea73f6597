"""Rules about host drivers that take what guests should get, and the other way round."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.check.rules import remedy
from vfiomgr.check.rules.groups import gpus
from vfiomgr.diagnostic import finding
from vfiomgr.pci.iommu import HARMLESS_DRIVERS
from vfiomgr.pci.model import CLASS_VGA

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.check.model import KernelModule, Readiness
    from vfiomgr.diagnostic import Diagnostic, Severity
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_NVIDIA = "10de"
_NOUVEAU = "nouveau"


def nouveau(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """With modeset=0 the module is loaded without a driver, and takes nothing."""
    module = facts.module(_NOUVEAU)
    if _NOUVEAU not in (*module.pci_drivers, *host.pci_drivers):
        return
    held = [d for d in host.devices if d.driver == _NOUVEAU]
    places = [f"/sys/module/{_NOUVEAU}"] if module.state == "loaded" else []
    holds = ", ".join(str(d) for d in held) or "no function now"
    blacklists = tuple(str(s) for s in facts.settings("blacklist", _NOUVEAU))
    displays = [d for d in held if _may_be_console(host, d)]
    shown = (f"{d} {_sign(d)}" for d in displays)
    yield finding(
        "nouveau",
        "warning",
        "nouveau is loaded",
        (*places, f"/sys/bus/pci/drivers/{_NOUVEAU} holds {holds}", *shown, *blacklists),
        "it takes any NVIDIA GPU that appears without a driver_override, at boot, at a rescan and "
        "after a guest, and unloads badly where a display is on it",
        _pinning(host, displays) if displays else _blacklisting(facts),
    )


def _may_be_console(host: HostSnapshot, device: PciDevice) -> bool:
    """The console's display, or one that could be it where no function is known to be."""
    is_unknown = not any(d.is_boot_display for d in host.devices)
    return device.is_boot_display or (is_unknown and device.class_code.startswith(CLASS_VGA))


def _sign(device: PciDevice) -> str:
    if device.is_boot_display:
        return f"is the console's display ({', '.join(device.display_signs) or 'boot_vga is 1'})"
    return f"may be the console's display: class {device.class_code}"


def _pinning(host: HostSnapshot, displays: Sequence[PciDevice]) -> str:
    """Keep nouveau, which shows the console, from the other GPUs of NVIDIA."""
    others = [
        d
        for d in gpus(host)
        if d.vendor_id == _NVIDIA and d not in displays and d.physical_function is None
    ]
    slots = {d.address.slot: d for d in reversed(others)}
    names = " ".join(str(d.address) for d in sorted(slots.values(), key=lambda d: d.address))
    why = "keep nouveau: without it the console stays dark"
    if not names:
        return f"{why}; a GPU for guests needs a card of its own, or another one for the console"
    return f"{why}; pin the GPUs for guests instead: vfiomgr bind --persist {names}"


def _blacklisting(facts: Readiness) -> str:
    return (
        f"put `blacklist nouveau` into /etc/modprobe.d/blacklist-nouveau.conf, "
        f"{remedy.rebuild_initramfs(facts)}, and reboot"
    )


def host_drivers(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Which drivers have the GPUs, and whether a rule of udev can come before them at boot."""
    for name in sorted({d.driver for d in _native(host) if d.driver and d.driver != _NOUVEAU}):
        held = [d for d in _native(host) if d.driver == name]
        module = facts.module((held[0].driver_module or name).replace("-", "_"))
        is_first = module.state == "built-in"
        severity: Severity = "warning" if is_first else "info"
        yield finding(
            "host-driver",
            severity,
            f"the host driver {name} has {_counted(held)}",
            (*(f"{d} is on {name}" for d in held[:_SHOWN]), *_beyond(held), *_module(module, host)),
            _race(name, is_first=is_first),
            _race_remedy(held, facts, is_first=is_first),
        )


_SHOWN = 4


def _native(host: HostSnapshot) -> list[PciDevice]:
    """GPUs that host drivers have and guests could get; virtual ones come after the boot."""
    return [
        d
        for d in gpus(host)
        if d.driver not in (None, *HARMLESS_DRIVERS)
        and d.physical_function is None
        and not d.is_for_guests
    ]


def _counted(devices: Sequence[PciDevice]) -> str:
    if len(devices) == 1:
        return "a GPU or accelerator"
    return f"{len(devices)} GPUs or accelerators"


def _beyond(devices: Sequence[PciDevice]) -> tuple[str, ...]:
    more = len(devices) - _SHOWN
    return (f"and {more} more: vfiomgr list",) if more > 0 else ()


def _module(module: KernelModule, host: HostSnapshot) -> tuple[str, ...]:
    match module.state:
        case "built-in":
            return (f"modules.builtin of {host.kernel_release} lists {module.name}",)
        case "loaded":
            return (f"/sys/module/{module.name}: a module, not built in",)
    return ()


def _race(name: str, *, is_first: bool) -> str:
    if is_first:
        return f"{name} is built into the kernel and takes them at boot before any rule of udev"
    return (
        f"at boot {name} takes them again, unless a rule of udev sets driver_override before its "
        "module loads: in the initramfs too, where that holds the module"
    )


def _race_remedy(held: Sequence[PciDevice], facts: Readiness, *, is_first: bool) -> str:
    bind = f"vfiomgr bind {held[0].address} takes it when a guest needs it"
    if is_first:
        return f"{bind}; so do it after each boot"
    return f"{bind}; for a rule to hold at boot, {remedy.rebuild_initramfs(facts)} after writing it"
