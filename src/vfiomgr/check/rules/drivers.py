"""Rules about host drivers that bind GPUs before vfio-pci does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.check.rules import remedy
from vfiomgr.check.rules.groups import gpus
from vfiomgr.diagnostic import finding
from vfiomgr.pci.iommu import HARMLESS_DRIVERS, blockers
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
    """Report nouveau, unless modeset=0 keeps it from registering a driver."""
    module = facts.module(_NOUVEAU)
    if _NOUVEAU not in (*module.pci_drivers, *host.pci_drivers):
        return
    held = [d for d in host.devices if d.driver == _NOUVEAU]
    places = [f"/sys/module/{_NOUVEAU}"] if module.state == "loaded" else []
    holds = ", ".join(str(d) for d in held) or "no function"
    blacklists = tuple(str(s) for s in facts.settings("blacklist", _NOUVEAU))
    displays = [d for d in held if _may_be_console(host, d)]
    shown = (f"{d} {_sign(d)}" for d in displays)
    yield finding(
        "nouveau",
        "warning",
        "nouveau is loaded",
        (*places, f"/sys/bus/pci/drivers/{_NOUVEAU}: {holds}", *shown, *blacklists),
        "it binds any NVIDIA GPU without driver_override at boot, after a rescan and after a "
        "guest, and may fail to unload while it drives a display",
        _pinning(host, displays) if displays else _blacklisting(facts),
    )


def _may_be_console(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether a function is the console's display, or may be if the display is unknown."""
    is_unknown = not any(d.is_boot_display for d in host.devices)
    return device.is_boot_display or (is_unknown and device.class_code.startswith(CLASS_VGA))


def _sign(device: PciDevice) -> str:
    if device.is_boot_display:
        return f"is the console's display ({', '.join(device.display_signs) or 'boot_vga is 1'})"
    return f"may be the console's display: class {device.class_code}"


def _pinning(host: HostSnapshot, displays: Sequence[PciDevice]) -> str:
    """Return the remedy that keeps nouveau for the console and pins the other NVIDIA GPUs."""
    others = [
        d
        for d in gpus(host)
        if d.vendor_id == _NVIDIA and d not in displays and d.physical_function is None
    ]
    slots = {d.address.slot: d for d in reversed(others)}
    names = " ".join(str(d.address) for d in sorted(slots.values(), key=lambda d: d.address))
    why = "keep nouveau: without it the console stays dark"
    if not names:
        return f"{why}; use a second graphics card for guests or for the console"
    return f"{why}; bind the GPUs for guests instead: vfiomgr bind --persist {names}"


def _blacklisting(facts: Readiness) -> str:
    return (
        f"add `blacklist nouveau` to /etc/modprobe.d/blacklist-nouveau.conf, "
        f"{remedy.rebuild_initramfs(facts)}, and reboot"
    )


def host_drivers(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report the host drivers of GPUs, and whether a udev rule can precede them at boot."""
    for name in sorted({d.driver for d in _native(host) if d.driver and d.driver != _NOUVEAU}):
        held = [d for d in _native(host) if d.driver == name]
        module = facts.module((held[0].driver_module or name).replace("-", "_"))
        is_first = module.state == "built-in"
        severity: Severity = "warning" if is_first else "info"
        yield finding(
            "host-driver",
            severity,
            f"{_counted(held)} on host driver {name}",
            (*(f"{d} is on {name}" for d in held[:_SHOWN]), *_beyond(held), *_module(module, host)),
            _race(name, "it" if len(held) == 1 else "them", is_first=is_first),
            _race_remedy(host, held[0], facts, is_first=is_first),
        )


_SHOWN = 4


def _native(host: HostSnapshot) -> list[PciDevice]:
    """GPUs on host drivers that could be assigned; VFs are excluded, as they appear after boot."""
    return [
        d
        for d in gpus(host)
        if d.driver not in (None, *HARMLESS_DRIVERS)
        and d.physical_function is None
        and not d.is_for_guests
    ]


def _counted(devices: Sequence[PciDevice]) -> str:
    if len(devices) == 1:
        return "1 GPU or accelerator"
    return f"{len(devices)} GPUs or accelerators"


def _beyond(devices: Sequence[PciDevice]) -> tuple[str, ...]:
    more = len(devices) - _SHOWN
    return (f"and {more} more; list them with: vfiomgr list",) if more > 0 else ()


def _module(module: KernelModule, host: HostSnapshot) -> tuple[str, ...]:
    match module.state:
        case "built-in":
            return (f"modules.builtin of {host.kernel_release} lists {module.name}",)
        case "loaded":
            return (f"/sys/module/{module.name}: loaded as a module",)
    return ()


def _race(name: str, them: str, *, is_first: bool) -> str:
    if is_first:
        return f"{name} is built into the kernel and binds {them} at boot before any udev rule"
    return (
        f"at boot {name} binds {them} again, unless a udev rule sets driver_override before its "
        "module loads (also in the initramfs, if it contains the module)"
    )


def _race_remedy(host: HostSnapshot, first: PciDevice, facts: Readiness, *, is_first: bool) -> str:
    slot = host.slot(first)
    blocking = blockers(host.group_members(first.iommu_group))
    shared = any(d not in slot and not d.is_bridge for d in blocking)
    bind = f"before a guest starts: vfiomgr bind {first.address}{' --with-group' * shared}"
    if is_first:
        return f"{bind} (repeat it after each boot)"
    rebuild = remedy.rebuild_initramfs(facts)
    return f"{bind}; for a rule that applies at boot, add --persist and {rebuild}"
