"""Memory behind free root ports, for devices that are attached later.

Firmware keeps 2 MiB of 32-bit memory behind a root port without a device. BARs that are not both
64-bit and prefetchable must fit into it when a device is attached: BAR 0 of NVIDIA's GPUs has 16
MiB or more. QEMU's root ports have the property mem-reserve for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.guests.model import Reason
from vfiomgr.pci.memory import port_window
from vfiomgr.units import MIB, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.guests.model import GuestDevice
    from vfiomgr.guests.placement import Buses
    from vfiomgr.snapshot.model import HostSnapshot

_DEFAULT = 2 * MIB


def free_port_bytes(host: HostSnapshot, inside: Sequence[GuestDevice]) -> int:
    """The 32-bit memory that the largest other GPU or accelerator of the host needs."""
    own = {function.address.slot for unit in inside for function in unit.functions}
    others = (d for d in host.devices if d.is_graphics_or_accelerator and d.address.slot not in own)
    return max((port_window(host.slot(device)) for device in others), default=0)


def with_port_memory(buses: Buses, count: int, needed: int) -> Buses:
    """Reserve memory behind the free ports, if the devices of this host need more than usual."""
    if not count or needed <= _DEFAULT:
        return buses
    taken = {place.bus for place in buses.places.values()}
    free = [b.number for b in buses.buses if b.kind == "root-port" and b.place is None]
    spare = frozenset([number for number in free if number not in taken][-count:])
    changed = (
        replace(bus, reserve_bytes=needed) if bus.number in spare else bus for bus in buses.buses
    )
    why = f"32-bit memory for the largest GPU or accelerator that may be attached: {size(needed)}"
    reasons = [r for r in buses.reasons if r.part not in {f"bus {number}" for number in spare}]
    reasons += [Reason(f"bus {number}", f"free; {why}") for number in sorted(spare)]
    return replace(buses, buses=tuple(changed), reasons=tuple(reasons))
