"""The buses of a guest as libvirt's PCI controllers.

memReserve is in KiB (formatdomain.html): libvirt 12.8 passes 32768 to QEMU as
mem-reserve=33554432.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.libvirt.model import EXPANDER, ROOT_PORT, TO_PCI, PciController

if TYPE_CHECKING:
    from vfiomgr.guests.model import GuestBus, GuestPlan

_MODELS = {
    "root": "pcie-root",
    "root-port": ROOT_PORT,
    "expander": EXPANDER,
    "bridge": TO_PCI,
}


def controllers_of(guest: GuestPlan) -> tuple[PciController, ...]:
    """One controller per bus; the root has the window for BARs."""
    hole = guest.window.hole_bytes
    return tuple(
        _controller(bus, hole >> 10 if hole is not None and bus.kind == "root" else None)
        for bus in guest.buses
    )


def _controller(bus: GuestBus, hole64_kib: int | None) -> PciController:
    return PciController(
        line=0,
        index=bus.number,
        model=_MODELS[bus.kind],
        guest=bus.place,
        bus_nr=bus.first_number,
        numa_node=bus.cell,
        has_hotplug=bus.has_hotplug,
        hole64_kib=hole64_kib,
        reserve_kib=None if bus.reserve_bytes is None else bus.reserve_bytes >> 10,
    )
