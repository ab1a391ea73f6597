"""Rules about host drivers that take what guests should get, and the other way round."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.model.iommu import HARMLESS_DRIVERS
from vfiomgr.model.readiness import Finding
from vfiomgr.planner.readiness import remedy
from vfiomgr.planner.readiness.groups import gpus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.model.pci import PciDevice
    from vfiomgr.model.readiness import KernelModule, Readiness, Severity
    from vfiomgr.model.snapshot import HostSnapshot

_NVIDIA = "10de"
_NOUVEAU = "nouveau"
_IDS = re.compile(r"(?:^|\s)ids=(\S+)")
_COMMAND_LINE_IDS = re.compile(r"(?:^|\s)(vfio[-_]pci\.ids=(\S+))")
_ANY = "ffffffff"


def nouveau(host: HostSnapshot, facts: Readiness) -> Iterator[Finding]:
    """With modeset=0 the module is loaded without a driver, and takes nothing."""
    module = facts.module(_NOUVEAU)
    if _NOUVEAU not in (*module.pci_drivers, *host.pci_drivers):
        return
    held = [d for d in host.devices if d.driver == _NOUVEAU]
    places = [f"/sys/module/{_NOUVEAU}"] if module.state == "loaded" else []
    holds = ", ".join(str(d) for d in held) or "no function now"
    blacklists = tuple(str(s) for s in facts.settings("blacklist", _NOUVEAU))
    yield Finding(
        "nouveau",
        "warning",
        "nouveau is loaded",
        (*places, f"/sys/bus/pci/drivers/{_NOUVEAU} holds {holds}", *blacklists),
        "it takes any NVIDIA GPU that appears without a driver_override, at boot, at a rescan and "
        "after a guest, and unloads badly where a display is on it",
        f"put `blacklist nouveau` into /etc/modprobe.d/blacklist-nouveau.conf, "
        f"{remedy.rebuild_initramfs(facts)}, and reboot",
    )


def host_drivers(host: HostSnapshot, facts: Readiness) -> Iterator[Finding]:
    """Which drivers have the GPUs, and whether a rule of udev can come before them at boot."""
    for name in sorted({d.driver for d in _native(host) if d.driver and d.driver != _NOUVEAU}):
        held = [d for d in _native(host) if d.driver == name]
        module = facts.module((held[0].driver_module or name).replace("-", "_"))
        is_first = module.state == "built-in"
        severity: Severity = "warning" if is_first else "info"
        yield Finding(
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


def taken_by_identifiers(host: HostSnapshot, facts: Readiness) -> Iterator[Finding]:
    """`ids=` of vfio-pci means every function with these numbers, twins and console included."""
    for source, ids in _identifiers(host, facts):
        for entry in ids.split(","):
            taken = [d for d in host.devices if _matches(entry, d) and not d.is_bridge]
            trouble = _trouble(taken)
            if trouble is None:
                continue
            yield Finding(
                "vfio-pci-ids",
                "warning",
                f"vfio-pci.ids={entry} means {trouble}",
                (source, *(f"{d} has these identifiers" for d in taken)),
                "when vfio-pci loads it takes all of them that have no driver yet",
                "take the identifiers out, and bind by address: vfiomgr bind ADDRESS",
            )


def _trouble(taken: Sequence[PciDevice]) -> str | None:
    if len({d.address.slot for d in taken}) > 1:
        return "more than one device"
    return "the console's display" if any(d.is_boot_display for d in taken) else None


def _identifiers(host: HostSnapshot, facts: Readiness) -> Iterator[tuple[str, str]]:
    for setting in facts.settings("options", "vfio_pci"):
        for ids in _IDS.findall(setting.arguments):
            yield str(setting), ids
    for word, ids in _COMMAND_LINE_IDS.findall(host.kernel_command_line or ""):
        yield f"/proc/cmdline: {word}", ids


def _matches(entry: str, device: PciDevice) -> bool:
    """Whether vendor:device[:subvendor[:subdevice[:class[:mask]]]] means a function."""
    wanted = [part.lower().removeprefix("0x") or _ANY for part in entry.split(":")][:4]
    found = [device.vendor_id, device.device_id, *device.subsystem_id.split(":")]
    pairs = zip(wanted, found, strict=False)
    return all(w == _ANY or w.zfill(4) == f for w, f in pairs) and len(wanted) > 1
