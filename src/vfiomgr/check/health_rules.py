"""Rules about the devices that guests have: links, PCIe errors, power, and devices that are gone.

Each takes the devices that it is about; without them, it is about all that are for guests. Checks
of hosts and domains and the node agent use the same ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import Diagnostic, finding, info, warning
from vfiomgr.passthrough import guards
from vfiomgr.pci.model import pci_device
from vfiomgr.snapshot.health import carriers, hops, missing, path_to
from vfiomgr.units import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vfiomgr.diagnostic import Severity
    from vfiomgr.pci.capabilities import PciLink
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.health import DeviceHealth, Hop, Rise
    from vfiomgr.snapshot.model import HostSnapshot

    Devices = Iterable[PciDevice] | None

_RESEAT = "reseat the card, and replace its riser or cable"
_SLOW_READINGS, _SLOW_SECONDS = 100, 86400.0
"""Readings without a faster link of a GPU, and their time, after which its speed is reported: its
guest may let it idle for hours."""
_NVIDIA, _AMD = "10de", "1002"
_OF_TRANSACTIONS = frozenset({"NonFatalErr"})
"""Corrected errors that are none of the link (advisory non-fatal errors, PCIe 6.0, 6.2.3.2.4)."""
_UNREAD = "regular readings (vfiomgr metrics install)"


OF_DEVICES = (
    *("narrow-link", "slow-link", "narrow-slot", "stuck-in-d3cold"),
    *("corrected-errors", "fatal-errors", "nonfatal-errors"),
)
"""The identifiers of `findings`."""


def findings(host: HostSnapshot, devices: Devices = None) -> Iterator[Diagnostic]:
    """Report all that is wrong with devices that are there."""
    yield from links(host, devices)
    yield from no_power(host, devices)
    if host.health is not None:
        yield from corrected_errors(host, host.health, devices)
        yield from uncorrected_errors(host, host.health, devices)


def links(host: HostSnapshot, devices: Devices = None) -> Iterator[Diagnostic]:
    """Report links with fewer lanes or a lower speed than both of their ends support."""
    found = {hop.port.address: hop for d in carriers(host, devices) for hop in hops(host, d)}
    for hop in found.values():
        readings = _slow_readings(host, hop)
        if hop.is_narrow:
            part = f"{hop.width}/{hop.best_width}"
            why = f"the guest gets {part} of the bandwidth that both ends support"
            what = f"has {hop.width} of {hop.best_width} lanes"
            yield _worse(host, hop, ("narrow-link", "warning"), what, why)
        if hop.is_slow and (readings or not hop.is_of_gpu):
            why = "both ends support the higher speed"
            if hop.is_of_gpu:
                why += f"; it was slower in {readings} readings, but GPUs lower it when idle"
            what = f"runs at {hop.speed:g} of {hop.best_speed:g} GT/s"
            severity: Severity = "info" if hop.is_of_gpu else "warning"
            yield _worse(host, hop, ("slow-link", severity), what, why)
        own, slot = hop.ends[1].max_width or 0, hop.ends[0].max_width
        if hop.is_of_gpu and slot is not None and slot < own:
            yield info(
                "narrow-slot",
                f"the slot of {hop.device} has {counted(slot, 'lane')}, the card supports {own}",
                tuple(map(_shown, hop.ends)),
                "the guest transfers data to and from the card more slowly",
                "use a slot with more lanes, or set the lanes of the slot (bifurcation) in the "
                "firmware setup",
                subject=hop.device,
            )


def _slow_readings(host: HostSnapshot, hop: Hop) -> int:
    """The readings in which a link was slower; 0 if there are too few, or in too short a time."""
    known = None if host.health is None else host.health.worse_link(hop.port.address)
    if known is None or (known.speed or 0) >= (hop.best_speed or 0):
        return 0
    is_long = known.last - known.seconds >= _SLOW_SECONDS
    return known.readings if is_long and known.readings >= _SLOW_READINGS else 0


def _worse(
    host: HostSnapshot, hop: Hop, rule: tuple[str, Severity], what: str, why: str
) -> Diagnostic:
    known = None if host.health is None else host.health.worse_link(hop.port.address)
    since = f"since when is unknown without {_UNREAD}"
    if known is not None and known.width == hop.width:
        since = f"since {known.seconds:.0f} s after boot, in {counted(known.readings, 'reading')}"
    above = f" (on the way to {hop.device})" if hop.below is not hop.device else ""
    remedy = (
        f"{_RESEAT}; check the lanes (bifurcation) and the PCIe generation of the slot in the "
        "firmware setup; then power-cycle the host, which negotiates the link again"
    )
    if rule[0] == "slow-link" and hop.is_of_gpu:
        speed = f"{pci_device(hop.device.address)}/current_link_speed"
        remedy = (
            f"while the guest uses the GPU, read its speed: cat {speed}; if it is low then too, "
            "check the PCIe generation of the slot in the firmware setup"
        )
    return finding(
        *rule,
        f"the PCIe link between {hop.port.address} and {hop.below}{above} {what}",
        (*map(_shown, hop.ends), since),
        why,
        remedy,
        subject=hop.device,
    )


def _shown(link: PciLink) -> str:
    now, best = _text(link.width, link.speed), _text(link.max_width, link.max_speed)
    return f"{pci_device(link.address)}: current_link_* {now}; max_link_* {best}"


def _text(width: int | None, speed: float | None) -> str:
    at = "unknown speed" if speed is None else f"{speed:g} GT/s"
    return f"{'unknown width' if width is None else f'x{width}'}, {at}"


def no_power(host: HostSnapshot, devices: Devices = None) -> Iterator[Diagnostic]:
    """Report functions that do not wake up from D3cold."""
    for device in _functions(host, devices):
        if device.has_lost_power and host.removed_first(device) is None:
            yield warning(
                "stuck-in-d3cold",
                f"{device.address} does not wake up from D3cold",
                (
                    f"{pci_device(device.address)}/power_state: {device.power_state}",
                    f"{pci_device(device.address)}/power/runtime_status: {device.runtime_status}",
                ),
                "its port did not turn its power on again, so no guest can use it",
                f"power-cycle the host; then: vfiomgr bind {device.address} --no-d3cold",
                subject=device,
            )


def corrected_errors(
    host: HostSnapshot, health: DeviceHealth, devices: Devices = None
) -> Iterator[Diagnostic]:
    """Report functions, and ports above them, with too many corrected errors.

    A root port counts the messages of functions that the kernel did not find (aer_isr_one_error in
    drivers/pci/pcie/aer.c).
    """
    ways = [path_to(host, device) for device in _functions(host, devices)]
    flooded = {
        each.address: each for way in ways for each in way if health.is_flooded(each.address)
    }
    for address, device in flooded.items():
        behind = [way[-1] for way in ways if device in way]
        yield _corrected(device, behind, health.rise(address), _kinds(health, address), "has")
    for root in {way[0].address: way[0] for way in ways if len(way) > 1}.values():
        behind = [way[-1] for way in ways if way[0] is root]
        is_known = any(each.address in flooded for way in ways if way[0] is root for each in way)
        if not is_known and health.is_flooded(root.address, "reported"):
            yield _corrected(root, behind, health.rise(root.address, "reported"), (), "received")


def _functions(host: HostSnapshot, devices: Devices) -> list[PciDevice]:
    return [each for device in carriers(host, devices) for each in host.slot(device)]


def _kinds(health: DeviceHealth, address: PciAddress) -> tuple[str, ...]:
    counters = health.now.of(address)
    return () if counters is None else counters.kinds


def _corrected(
    device: PciDevice,
    behind: list[PciDevice],
    rise: Rise | None,
    kinds: tuple[str, ...],
    verb: str,
) -> Diagnostic:
    assert rise is not None  # noqa: S101 - it has counters
    names = {text.partition(" ")[0] for text in kinds}
    file = "aer_dev_correctable" if verb == "has" else "aer_rootport_total_err_cor"
    why = "the link repeats what it transfers; a bad contact, riser or cable, or power saving"
    if names and names <= _OF_TRANSACTIONS:
        why = "the device reports requests that it does not support; its link has no errors"
    others = ", ".join(str(one.address) for one in behind if one is not device)
    rate = f"{rise.per_minute or 0.0:.0f} corrected PCIe errors per minute"
    return warning(
        "corrected-errors",
        f"{device} {verb} {rate}{' on average since boot' if rise.is_since_boot else ''}",
        (
            f"{pci_device(device.address)}/{file}: {_over(rise)}",
            *((f"errors by kind since boot: {', '.join(kinds)}",) if kinds else ()),
            *((f"devices for guests below it: {others}",) if others else ()),
        ),
        why,
        f"{_RESEAT}, or select a lower PCIe generation for its slot in the firmware setup; if the "
        "errors come while it is idle: pcie_aspm=off",
        subject=device,
    )


def _over(rise: Rise) -> str:
    if rise.is_since_boot:
        at = "" if rise.seconds is None else f" {rise.seconds:.0f} s ago"
        return f"{rise.count} since boot{at}; no earlier reading"
    return f"{rise.count} more than {rise.seconds or 0:.0f} s ago"


def uncorrected_errors(
    host: HostSnapshot, health: DeviceHealth, devices: Devices = None
) -> Iterator[Diagnostic]:
    """Report errors that the hardware could not correct: new ones, or those since boot."""
    ways = (path_to(host, device) for device in _functions(host, devices))
    for device in {each.address: each for way in ways for each in way}.values():
        for kind, word in (("fatal", "fatal"), ("nonfatal", "non-fatal")):
            rise = health.rise(device.address, kind)
            if rise is None or not rise.count:
                continue
            if rise.is_since_boot and kind == "nonfatal" and device.is_bridge:
                continue  # when the host starts, it looks for devices that do not exist
            kinds = _kinds(health, device.address)
            since = "since boot" if rise.is_since_boot else f"in the last {rise.seconds or 0:.0f} s"
            yield finding(
                f"{kind}-errors",
                "info" if rise.is_since_boot else "warning",
                f"{device} had {counted(rise.count, f'{word} PCIe error')} {since}",
                (
                    f"{pci_device(device.address)}/aer_dev_{kind}: {_over(rise)}",
                    *((f"errors by kind since boot: {', '.join(kinds)}",) if kinds else ()),
                ),
                "a transfer failed: the guest may have lost data, or the device"
                if not rise.is_since_boot
                else "some devices report errors when the host starts; new ones matter",
                f"check whether the guest still uses the device; {_RESEAT} if it happens again; "
                "the kernel log has each error: vfiomgr explain --log",
                subject=device,
            )


def gone(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report devices of this boot that are gone: bound by vfiomgr, or read regularly.

    While the firmware of a laptop has its discrete GPU turned off, its functions are gone; they
    cannot be told from others, except from bound ones of other vendors.
    """
    is_off = host.health is not None and host.health.is_gpu_off
    vendors = {origin.device.address: origin.device.vendor_id for origin in host.origins}
    for address in sorted(missing(host, host.health)):
        if is_off and vendors.get(address, _NVIDIA) in (_NVIDIA, _AMD):
            continue
        if any(d.index_of_function(address) is not None for d in host.devices):
            continue  # a virtual function, which is removed with a number
        yield warning(
            "device-gone",
            f"{address} was there in this boot and is gone",
            (f"{pci_device(address)} does not exist",),
            "it was removed, or it lost its link or power; its guest lost it too",
            "check the kernel log of its port (pciehp, DPC): vfiomgr explain --log; rescan: "
            "echo 1 > /sys/bus/pci/rescan; if it stays away, power-cycle the host. If a person "
            "removed it, this finding ends with the next boot",
            subject=address,
        )


def half_removed(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Report what is left of a card whose function 0 was removed."""
    for device in filter(host.removed_first, host.devices):
        for found in guards.silence(host, device):
            state = f"{pci_device(device.address)}/power_state: {device.power_state}"
            why = "it may be without power; suspend and resume then wait for it for a minute"
            yield replace(found, severity="warning", evidence=(state,), why=why)


def unread(host: HostSnapshot) -> Iterator[str]:
    """What the rules about errors cannot tell."""
    health = host.health
    if not carriers(host):
        return
    if health is None:
        yield "links and PCIe errors of devices for guests: not in the snapshot"
    elif not any(map(health.now.of, (device.address for device in carriers(host)))):
        why = "AER is off, or the firmware controls it"
        yield f"PCIe errors: no device for guests has counters ({why})"
    elif health.base is None:
        yield f"present rates of PCIe errors: only the numbers since boot, without {_UNREAD}"
