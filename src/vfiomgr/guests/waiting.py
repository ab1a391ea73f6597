"""Notes about devices that must be bound before a guest can use them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr import passthrough

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from vfiomgr.pci.model import PciAddress
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
    waiting = [a for a in addresses if not host.vgpus.is_ready_for_guests(host.device(a))]
    if not waiting:
        return
    if len(waiting) > passthrough.readiness_hints.MOST:
        devices = [host.device(address) for address in waiting]
        passthrough.readiness_hints.tell_of_many(source, devices)
        return
    whole = around()
    devices = [whole.device(address) for address in waiting]
    passthrough.readiness_hints.tell_how_to_bind(source, whole, devices)
