"""Rules about single functions: no answer, duplicates, reset, D3cold, firmware framebuffer."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from vfiomgr.check.rules import remedy
from vfiomgr.check.rules.amd_resets import is_known
from vfiomgr.check.rules.groups import gpus
from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.passthrough import guards
from vfiomgr.pci.model import CLASS_VGA
from vfiomgr.snapshot.model import UNIDENTIFIED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.check.model import Readiness
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_WEAK = frozenset({"bus", "pm"})
_DEVICES = "/sys/bus/pci/devices"
_EVICTING_MAJOR = 6


def none(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report a host without PCI functions, e.g. in a container or an empty recording."""
    unidentified = host.pci_unidentified
    if not host.devices and unidentified:
        yield finding(
            "no-devices",
            "blocker",
            "no PCI function can be identified",
            (f"{_DEVICES}: {len(unidentified)} functions, e.g. {unidentified[0]}: {UNIDENTIFIED}",),
            "vfiomgr cannot determine which of them can be assigned",
            "record these files of each function too, or run vfiomgr on the host itself",
        )
    elif not host.devices:
        yield finding(
            "no-devices",
            "blocker",
            "no PCI function found",
            (f"{_DEVICES}: {host.pci_unlisted or 'it is empty'}",),
            "there is no device to assign",
            "run vfiomgr with access to the host's /sys; in a virtual machine, add a PCI device",
        )


def silence(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report functions that fell off the bus."""
    for device in host.devices:
        for diagnostic in guards.silence(host, device):
            yield finding(
                "silent-device",
                "warning",
                f"{device} does not answer",
                (f"{_DEVICES}/{device.address}/config reads as all ones",),
                "it fell off the bus: no driver and no guest can use it",
                diagnostic.remedy,
                subject=device,
            )


def twins(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report identical GPUs, including the console's display."""
    alike: dict[tuple[str, str], list[PciDevice]] = defaultdict(list)
    for device in host.devices:
        is_whole = device.physical_function is None
        if device.is_graphics_or_accelerator and is_whole and not device.is_nvswitch:
            alike[device.vendor_id, device.device_id].append(device)
    for (vendor, model), devices in alike.items():
        if len(devices) > 1:
            yield finding(
                "twins",
                "info",
                f"{len(devices)} GPUs have the PCI IDs {vendor}:{model}",
                tuple(f"{d}{', the console' * d.is_boot_display}" for d in devices),
                "binding by PCI IDs (vfio-pci.ids=, new_id) binds all of them",
                "bind by address: vfiomgr bind ADDRESS",
            )


def no_reset(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report GPUs for which the kernel has no reset method."""
    devices = [d for d in _resettable_gpus(host) if not d.reset_method]
    if devices:
        yield finding(
            "no-reset",
            "warning",
            "a GPU has no reset method",
            tuple(f"{_DEVICES}/{d.address}/reset_method is absent or empty" for d in devices),
            "the next guest may fail to initialize it; VFIO can only reset all functions below the "
            "port together, if all are on VFIO drivers",
            "bind the entire slot, as vfiomgr does by default; then start, stop and start a guest "
            "as a test",
        )


def weak_reset(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report GPUs with only a bus or power-management reset."""
    devices = [d for d in _resettable_gpus(host) if d.reset_method and set(d.reset_method) <= _WEAK]
    if devices:
        yield finding(
            "weak-reset",
            "info",
            "a GPU has no function-level reset",
            tuple(f"{_DEVICES}/{d.address}/reset_method: {_methods(d)}" for d in devices),
            "a bus reset affects all functions below the port, and a power-management reset may "
            "keep state: some GPUs do not start a second time",
            "start, stop and start a guest as a test",
        )


def _methods(device: PciDevice) -> str:
    return " ".join(device.reset_method)


def _resettable_gpus(host: HostSnapshot) -> list[PciDevice]:
    """GPUs whose reset methods are known; none before Linux 5.15 or without the attribute.

    GPUs with known reset problems are excluded (`amd_resets`).
    """
    if not any(d.reset_method for d in host.devices):
        return []
    whole = (d for d in gpus(host) if d.physical_function is None and d.is_responsive)
    return [d for d in whole if not is_known(d)]


def d3cold(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report GPUs that the kernel may power off while they are idle."""
    if (facts.module("vfio_pci").parameters or {}).get("disable_idle_d3") == "Y":
        return
    devices = [d for d in gpus(host) if d.d3cold_allowed and d.physical_function is None]
    if devices:
        yield finding(
            "d3cold",
            "info",
            "D3cold is allowed for idle GPUs",
            tuple(f"{_DEVICES}/{d.address}/d3cold_allowed: 1{_power(d)}" for d in devices),
            "vfio-pci lets idle functions sleep; if the port cuts their power, a few devices do "
            "not wake up until the host is power-cycled",
            "if a GPU disappears this way, bind it with: "
            f"vfiomgr bind {devices[0].address} --no-d3cold; if it is on VFIO already, write 0 "
            "to its d3cold_allowed",
        )


def _power(device: PciDevice) -> str:
    return f", power_state {device.power_state}" if device.power_state else ""


def _evicts(release: str | None) -> bool:
    """Whether vfio-pci of this kernel removes the firmware framebuffer from VGA functions."""
    major = (release or "").partition(".")[0]
    return major.isdecimal() and int(major) >= _EVICTING_MAJOR


def firmware_framebuffer(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report a framebuffer that vfio-pci does not remove.

    vfio_pci_vga_init removes it from VGA functions only, since Linux 6.0.
    """
    claims = facts.framebuffers or ()
    for device in host.devices:
        names = ", ".join(claim.name for claim in claims if claim.device == device.address)
        is_vga = device.class_code.startswith(CLASS_VGA)
        if not names or (is_vga and _evicts(host.kernel_release)):
            continue
        kept = "" if is_vga else "; vfio-pci removes it from VGA functions only"
        since = "before Linux 6.0, " if is_vga else ""
        since = f"if you assign it to a guest, {since}" if device.is_boot_display else since
        yield finding(
            "firmware-framebuffer",
            "info" if is_vga else "warning",
            f"the firmware's framebuffer uses the memory of {device}",
            (f"/proc/iomem: {names} below {device.address}", f"class {device.class_code}"),
            f"the framebuffer occupies the function's BAR (\"can't reserve\" in dmesg){kept}",
            f"{since}add initcall_blacklist=sysfb_init to the kernel command line"
            f"{remedy.command_line(facts)} and reboot",
            subject=device,
        )
