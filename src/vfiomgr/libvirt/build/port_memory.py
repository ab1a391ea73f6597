"""Memory behind free root ports, for devices that are attached later.

Firmware keeps 2 MiB of 32-bit memory behind a root port without a device. BARs that are not both
64-bit and prefetchable must fit into it when a device is attached: BAR 0 of NVIDIA's GPUs has 16
MiB or more. memReserve is in KiB (formatdomain.html): libvirt 12.8 passes 32768 to QEMU as
mem-reserve=33554432.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.libvirt.build.model import Reason
from vfiomgr.libvirt.model import PORT_MEMORY, ROOT_PORT
from vfiomgr.pci.memory import port_window
from vfiomgr.units import MIB, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.guests.device import GuestDevice
    from vfiomgr.libvirt.build.pci_topology import Buses
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.units import Version

_DEFAULT = 2 * MIB


def free_port_bytes(host: HostSnapshot, inside: Sequence[GuestDevice]) -> int:
    """The 32-bit memory that the largest other GPU or accelerator of the host needs."""
    own = {function.address.slot for unit in inside for function in unit.functions}
    others = (d for d in host.devices if d.is_graphics_or_accelerator and d.address.slot not in own)
    return max((port_window(host.slot(device)) for device in others), default=0)


def with_port_memory(buses: Buses, count: int, needed: int, libvirt: Version) -> Buses:
    """Reserve memory behind the free ports, if the devices of this host need more than usual."""
    if not count or needed <= _DEFAULT or not PORT_MEMORY.is_in(libvirt):
        return buses
    taken = {place.bus for place in buses.places.values()}
    free = [c.index for c in buses.controllers if c.model == ROOT_PORT and c.guest is None]
    spare = frozenset([index for index in free if index not in taken][-count:])
    controllers = (
        replace(controller, reserve_kib=needed >> 10) if controller.index in spare else controller
        for controller in buses.controllers
    )
    why = f"32-bit memory for the largest GPU or accelerator that may be attached: {size(needed)}"
    reasons = [r for r in buses.reasons if r.part not in {f"controller {i}" for i in spare}]
    reasons += [Reason(f"controller {index}", f"free; {why}") for index in sorted(spare)]
    return replace(buses, controllers=tuple(controllers), reasons=tuple(reasons))
