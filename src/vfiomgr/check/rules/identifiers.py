"""Rules about `ids=` of vfio-pci: which functions it matches, and which vfio-pci has bound."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import Diagnostic, finding
from vfiomgr.pci.iommu import is_blocking
from vfiomgr.pci.model import PciDevice
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vfiomgr.check.model import Readiness
    from vfiomgr.snapshot.model import HostSnapshot

_IDS = re.compile(r"(?:^|\s)ids=(\S+)")
_COMMAND_LINE_IDS = re.compile(r"(?:^|\s)(vfio[-_]pci\.ids=(\S+))")
_ANY = "ffffffff"


class _Entry(Value):
    """One vendor:device of a list, and the matching functions."""

    source: str
    text: str
    meant: tuple[PciDevice, ...]


def taken_by_identifiers(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report `ids=` entries that match several devices or the console's display."""
    for entry in _entries(host, facts):
        trouble = _trouble(entry.meant)
        if trouble is not None:
            yield finding(
                "vfio-pci-ids",
                "warning",
                f"vfio-pci.ids={entry.text} matches {trouble}",
                (entry.source, *(f"{d} has these PCI IDs" for d in entry.meant)),
                "when vfio-pci loads, it binds all of them that have no driver",
                "remove the PCI IDs, and bind by address: vfiomgr bind ADDRESS",
            )


def _trouble(meant: Sequence[PciDevice]) -> str | None:
    if len({d.address.slot for d in meant}) > 1:
        return "more than one device"
    return "the console's display" if any(d.is_boot_display for d in meant) else None


def lost_race(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report functions that `ids=` matches but a host driver has bound."""
    entries = _entries(host, facts)
    lost = _once(d for e in entries for d in e.meant if is_blocking(d) and not d.is_boot_display)
    if not lost:
        return
    sources = dict.fromkeys(e.source for e in entries if any(d in lost for d in e.meant))
    module = facts.module("vfio_pci")
    absent = ("vfio_pci is not loaded",) if module.state == "available" else ()
    yield finding(
        "vfio-pci-ids-lost",
        "warning",
        f"vfio-pci has not bound {_counted(lost)} that vfio-pci.ids= matches",
        (*sources, *(f"{d} is on {d.driver}" for d in lost), *absent),
        "ids= applies only to functions without a driver when vfio-pci loads; the driver that "
        "loads first keeps them",
        f"bind them by address, independent of the load order: {_pin(lost)}",
    )


def left_out(host: HostSnapshot, facts: Readiness) -> Iterator[Diagnostic]:
    """Report functions of a slot that `ids=` does not match and that are not on VFIO.

    On a root bus, which cannot be reset, only functions in the IOMMU group of a matching one count.
    """
    entries = _entries(host, facts)
    meant = _once(d for e in entries for d in e.meant if not d.is_boot_display)
    taken = [d for d in meant if d.physical_function is None]
    rest = _once(
        o
        for d in taken
        for o in host.slot(d)
        if o not in meant and not o.is_on_vfio
        if o.iommu_group == d.iommu_group or "/" in o.bridge_path
    )
    if not rest:
        return
    slots = {d.address.slot for d in rest}
    partly = [d for d in taken if d.address.slot in slots]
    sources = dict.fromkeys(e.source for e in entries if any(d in partly for d in e.meant))
    yield finding(
        "vfio-pci-ids-incomplete",
        "warning",
        f"vfio-pci.ids= omits {_counted(rest)} of the same slot",
        (*sources, *(f"{d} is {_state(d)}" for d in rest)),
        "a group with a function on a host driver cannot be assigned, and VFIO can reset a slot "
        "only while all of its functions are on VFIO drivers",
        f"bind entire slots by address: {_pin(partly)}",
    )


def _state(device: PciDevice) -> str:
    return f"on {device.driver}" if device.driver else "on no driver"


def _counted(devices: Sequence[PciDevice]) -> str:
    return "1 function" if len(devices) == 1 else f"{len(devices)} functions"


def _pin(devices: Sequence[PciDevice]) -> str:
    """The command that binds one function of each slot, which binds the entire slot."""
    firsts = {d.address.slot: d.address for d in reversed(devices)}
    return f"vfiomgr bind --persist {' '.join(map(str, sorted(firsts.values())))}"


def _once(devices: Iterator[PciDevice]) -> list[PciDevice]:
    return sorted(dict.fromkeys(devices), key=lambda device: device.address)


def _entries(host: HostSnapshot, facts: Readiness) -> list[_Entry]:
    return [
        _Entry(
            source,
            text,
            tuple(d for d in host.devices if _matches(text, d) and not d.is_bridge),
        )
        for source, ids in _identifiers(host, facts)
        for text in ids.strip('"').split(",")
    ]


def _identifiers(host: HostSnapshot, facts: Readiness) -> Iterator[tuple[str, str]]:
    for setting in facts.settings("options", "vfio_pci"):
        for ids in _IDS.findall(setting.arguments):
            yield str(setting), ids
    for word, ids in _COMMAND_LINE_IDS.findall(host.kernel_command_line or ""):
        yield f"/proc/cmdline: {word}", ids


def _matches(entry: str, device: PciDevice) -> bool:
    """Whether vendor:device[:subvendor[:subdevice[:class[:mask]]]] matches a function."""
    wanted = [part.lower().removeprefix("0x") or _ANY for part in entry.split(":")][:4]
    found = [device.vendor_id, device.device_id, *device.subsystem_id.split(":")]
    pairs = zip(wanted, found, strict=False)
    return all(w == _ANY or w.zfill(4) == f for w, f in pairs) and len(wanted) > 1
