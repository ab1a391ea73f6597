"""Rules about single functions: dead ones, twins, reset, D3cold, the firmware's framebuffer."""

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
    """A host without PCI functions, e.g. a container's or a recording's empty tree."""
    unidentified = host.pci_unidentified
    if not host.devices and unidentified:
        yield finding(
            "no-devices",
            "blocker",
            "no PCI function can be identified",
            (f"{_DEVICES}: {len(unidentified)} functions, e.g. {unidentified[0]}: {UNIDENTIFIED}",),
            "which of them could go to a guest is unknown",
            "record these files of each function too, or run vfiomgr on the host itself",
        )
    elif not host.devices:
        yield finding(
            "no-devices",
            "blocker",
            "no PCI function is seen",
            (f"{_DEVICES}: {host.pci_unlisted or 'it is empty'}",),
            "there is nothing that could go to a guest",
            "run vfiomgr where the host's own /sys is seen; in a virtual machine, give it a device",
        )


def silence(host: HostSnapshot) -> Iterator[Diagnostic]:
    """A function that fell off the bus."""
    for device in host.devices:
        for diagnostic in guards.silence(host, device):
            yield finding(
                "silent-device",
                "warning",
                f"{device} does not answer",
                (f"{_DEVICES}/{device.address}/config reads as all ones",),
                "it is off the bus: no driver and no guest can use it",
                diagnostic.remedy,
                subject=device,
            )


def twins(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Identical GPUs, the console's among them."""
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
                f"{len(devices)} GPUs have the identifiers {vendor}:{model}",
                tuple(f"{d}{', the console' * d.is_boot_display}" for d in devices),
                "what binds by identifiers (vfio-pci.ids=, new_id) takes all of them",
                "bind by address, as vfiomgr does",
            )


def no_reset(host: HostSnapshot) -> Iterator[Diagnostic]:
    """GPUs that the kernel cannot reset by themselves."""
    devices = [d for d in _resettable_gpus(host) if not d.reset_method]
    if devices:
        yield finding(
            "no-reset",
            "warning",
            "a GPU cannot be reset by itself",
            tuple(f"{_DEVICES}/{d.address}/reset_method is absent or empty" for d in devices),
            "a guest may find it as the last one left it, and fail to start it; what remains is "
            "VFIO's reset of all functions below the port, which all must be on VFIO drivers",
            "bind the whole slot, as vfiomgr does; start, stop and start a guest before you rely "
            "on it",
        )


def weak_reset(host: HostSnapshot) -> Iterator[Diagnostic]:
    """GPUs with a bus or power-management reset and no function-level one."""
    devices = [d for d in _resettable_gpus(host) if d.reset_method and set(d.reset_method) <= _WEAK]
    if devices:
        yield finding(
            "weak-reset",
            "info",
            "a GPU has no function-level reset",
            tuple(f"{_DEVICES}/{d.address}/reset_method: {_methods(d)}" for d in devices),
            "a bus reset takes along all functions below the port, and one by power management may "
            "keep state: some GPUs do not start a second time",
            "start, stop and start a guest before you rely on it",
        )


def _methods(device: PciDevice) -> str:
    return " ".join(device.reset_method)


def _resettable_gpus(host: HostSnapshot) -> list[PciDevice]:
    """None on kernels before 5.15 and in recordings that lack the attribute.

    Those with trouble of their own are left to `amd.reset_trouble`.
    """
    if not any(d.reset_method for d in host.devices):
        return []
    whole = (d for d in gpus(host) if d.physical_function is None and d.is_responsive)
    return [d for d in whole if not is_known(d)]


def d3cold(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """GPUs whose power the kernel may cut while they wait for a guest."""
    if (facts.module("vfio_pci").parameters or {}).get("disable_idle_d3") == "Y":
        return
    devices = [d for d in gpus(host) if d.d3cold_allowed and d.physical_function is None]
    if devices:
        yield finding(
            "d3cold",
            "info",
            "D3cold is allowed for idle GPUs",
            tuple(f"{_DEVICES}/{d.address}/d3cold_allowed: 1{_power(d)}" for d in devices),
            "vfio-pci lets an idle function sleep, and where the port can cut its power, a few "
            "devices do not wake again until the host is power-cycled",
            "if one vanishes so, write 0 to its d3cold_allowed before the next guest",
        )


def _power(device: PciDevice) -> str:
    return f", power_state {device.power_state}" if device.power_state else ""


def _evicts(release: str | None) -> bool:
    """Whether vfio-pci of a kernel evicts the firmware's screen from VGA functions."""
    major = (release or "").partition(".")[0]
    return major.isdecimal() and int(major) >= _EVICTING_MAJOR


def firmware_framebuffer(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """vfio-pci evicts it from VGA functions alone (vfio_pci_vga_init, since Linux 6.0)."""
    claims = facts.framebuffers or ()
    for device in host.devices:
        names = ", ".join(claim.name for claim in claims if claim.device == device.address)
        is_vga = device.class_code.startswith(CLASS_VGA)
        if not names or (is_vga and _evicts(host.kernel_release)):
            continue
        kept = "" if is_vga else ", and vfio-pci evicts it from VGA functions alone"
        since = "before Linux 6.0, " if is_vga else ""
        since = f"if a guest is to have it, {since}" if device.is_boot_display else since
        yield finding(
            "firmware-framebuffer",
            "info" if is_vga else "warning",
            f"the firmware's screen lies in the memory of {device}",
            (f"/proc/iomem: {names} below {device.address}", f"class {device.class_code}"),
            f"while it is there the function's BAR is taken (\"can't reserve\" in dmesg){kept}",
            f"{since}put initcall_blacklist=sysfb_init on the kernel command line"
            f"{remedy.command_line(facts)} and reboot",
            subject=device,
        )
