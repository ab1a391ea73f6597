"""Notes about devices that must be bound before a guest can use them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from vfiomgr import passthrough
from vfiomgr.passthrough.isolation import reserved_region

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciAddress, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


def note_unbound(
    source: HostSource,
    around: Callable[[], HostSnapshot],
    addresses: Iterable[PciAddress],
    host: HostSnapshot,
) -> None:
    """Note how to make the functions that no guest can open yet available.

    `host` has the functions, `around` returns the entire host and is called only if needed.
    """
    functions = [host.device(address) for address in addresses]
    note_reserved(source, host, [d for d in functions if d.is_on_vfio])
    waiting = [d.address for d in functions if not host.vgpus.is_ready_for_guests(d)]
    if not waiting:
        return
    if len(waiting) > passthrough.readiness_hints.MOST:
        devices = [host.device(address) for address in waiting]
        passthrough.readiness_hints.tell_of_many(source, devices)
        return
    whole = around()
    devices = [whole.device(address) for address in waiting]
    passthrough.readiness_hints.tell_how_to_bind(source, whole, devices)


def note_reserved(source: HostSource, host: HostSnapshot, bound: Iterable[PciDevice]) -> None:
    """Note memory that the firmware requires mapped 1:1, once for each group of functions.

    For functions that are not on a VFIO driver, `bind` refuses it.
    """
    for device in {device.iommu_group: device for device in bound}.values():
        for found in reserved_region(host, device):
            source.on_note(f"{found.summary}; remedy: {found.without('allow').hint}")
