"""Place devices in the guest: address spaces, root ports, and expanders for NUMA locality.

Behind a virtual IOMMU each PCI Express function has its own address space, even in one slot with
others; everything behind a bridge to conventional PCI shares one (pci_device_iommu_address_space in
hw/pci/pci.c). VFIO allows a group only one space: "group N used in multiple address spaces"
(vfio_get_group).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import refuse
from vfiomgr.guests.model import GuestAddress, GuestBus, GuestDevice, Reason
from vfiomgr.pci.memory import port_window
from vfiomgr.units import MIB, size
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot


class RootPortSlot(Value):
    """Units behind one root port: one unit, or several that share an address space."""

    units: tuple[GuestDevice, ...]
    is_shared: bool = False
    """Whether they are behind a bridge to conventional PCI."""

    @property
    def first(self) -> GuestDevice:
        """The unit whose NUMA node is used."""
        return self.units[0]

    @property
    def names(self) -> str:
        """All functions."""
        return ", ".join(unit.names for unit in self.units)


def slots_of(units: Sequence[GuestDevice], *, has_viommu: bool) -> tuple[RootPortSlot, ...]:
    """One slot per unit; units that share a group share one if the guest has an IOMMU."""
    if not has_viommu:
        return tuple(RootPortSlot((unit,)) for unit in units)
    shared = set(
        functions_by_shared_group(function for unit in units for function in unit.functions)
    )
    slots: list[tuple[list[GuestDevice], set[int]]] = []
    for unit in units:
        own = {f.iommu_group for f in unit.functions if f.iommu_group is not None} & shared
        with_it = [slot for slot in slots if own & slot[1]]
        if not with_it:
            slots.append(([unit], own))
            continue
        first, *others = with_it
        for slot in others:
            slots.remove(slot)
        first[0].extend([*(u for slot in others for u in slot[0]), unit])
        first[1].update(own, *(slot[1] for slot in others))
    return tuple(RootPortSlot(tuple(inside), bool(groups)) for inside, groups in slots)


def functions_by_shared_group(functions: Iterable[PciDevice]) -> dict[int, list[PciDevice]]:
    """The groups that contain several of the functions."""
    groups: dict[int, list[PciDevice]] = defaultdict(list)
    for function in functions:
        if function.iommu_group is not None:
            groups[function.iommu_group].append(function)
    return {number: members for number, members in groups.items() if len(members) > 1}


def space_notes(slots: Iterable[RootPortSlot]) -> Iterator[str]:
    """Notes about the limits of functions behind a bridge."""
    for slot in slots:
        if slot.is_shared:
            yield (
                f"{slot.names} share an IOMMU group, so behind a virtual IOMMU they share a "
                "bridge to conventional PCI: the guest sees no PCI Express features (resizable "
                "BARs, ATS, link state); to keep them, assign one function: --device "
                f"{slot.first.function_names[0]},only"
            )


_PORTS_OF_EXPANDER = 32
"""Slots of its bus (virDomainPCIAddressBusSetModel in conf/domain_addr.c of libvirt)."""
_SLOTS_OF_BRIDGE = range(1, 32)
"""Of a pcie-to-pci-bridge; 0 is its own (virDomainPCIAddressBusSetModel)."""
_BUSES = 256

Place = tuple[str | None, int | None]
"""A root complex of the host, and one of its NUMA nodes."""


class Buses(Value):
    """The buses of a guest, and the place of each unit's first function by name."""

    buses: tuple[GuestBus, ...]
    places: dict[str, GuestAddress]
    reasons: tuple[Reason, ...]


def lay_buses(  # noqa: PLR0913 - what the buses depend on
    slots: Sequence[RootPortSlot],
    others: int,
    spare: int,
    cells: Sequence[int],
    *,
    is_local: bool,
    is_apart: bool = False,
) -> Buses:
    """Assign a root port to each slot; behind expanders if the devices come from several places.

    `others` is the number of emulated devices behind root ports, `spare` the
    number of ports that stay free; `cells` are the host nodes by guest cell. With `is_apart` each
    place has an expander, also a single one.

    Raises:
        Refusal: the guest has too few buses, or a bridge too few slots.
    """
    topology = _Topology(cells)
    places = _places(slots) if is_local or is_apart else ()
    expanded = places if is_apart or len(places) > 1 or len(cells) > 1 else ()
    for slot in slots:
        if _place(slot) not in expanded:
            topology.add_slot(slot)
    for _ in range(others):
        topology.add_port("for a disk, a network or another emulated device")
    for _ in range(spare):
        topology.add_port("free, for a device that is attached later")
    numbers = _bus_numbers(expanded, slots)
    if min(numbers, default=_BUSES) < len(topology.buses):
        message = f"{len(slots)} devices and {others + spare} more root ports need too many buses"
        remedy = "pass fewer --spare-ports or devices: a guest has 256 buses"
        refuse("too-many-buses", "", message, remedy)
    for place, number in zip(expanded, numbers, strict=True):
        topology.add_expander(place, number, [slot for slot in slots if _place(slot) == place])
    return Buses(tuple(topology.buses), topology.places, tuple(topology.reasons))


def without_hotplug(buses: Buses) -> Buses:
    """The same buses, with hot-plug disabled for the ports of host devices."""
    ports = {_port(buses, place.bus) for place in buses.places.values()}
    changed = (replace(bus, has_hotplug=bus.number not in ports) for bus in buses.buses)
    return replace(buses, buses=tuple(changed))


def _port(buses: Buses, number: int) -> int:
    """The port above a bus; for a bridge, the port that it is behind."""
    bus = buses.buses[number]
    return bus.place.bus if bus.kind == "bridge" and bus.place else number


def _bus_numbers(places: Sequence[Place], slots: Sequence[RootPortSlot]) -> list[int]:
    """Bus numbers of expanders, up to the last bus: each reserves one per port and bridge."""
    numbers, end = [], _BUSES
    for place in reversed(places):
        end -= 1 + sum(1 + slot.is_shared for slot in slots if _place(slot) == place)
        numbers.append(end)
    return numbers[::-1]


def _place(slot: RootPortSlot) -> Place:
    return (slot.first.root_complex, slot.first.numa_node)


def _places(slots: Sequence[RootPortSlot]) -> tuple[Place, ...]:
    """The root complexes with their nodes, in device order."""
    known = (slot for slot in slots if slot.first.root_complex is not None)
    return tuple(dict.fromkeys(_place(slot) for slot in known))


class _Topology:
    """A list of buses; the number of a bus is its position."""

    def __init__(self, cells: Sequence[int]) -> None:
        self._cells = cells
        self.buses = [GuestBus(0, "root")]
        self.reasons: list[Reason] = []
        self.places: dict[str, GuestAddress] = {}

    def _add(self, why: str, bus: GuestBus) -> int:
        self.buses.append(bus)
        self.reasons.append(Reason(f"bus {bus.number}", why))
        return bus.number

    def add_port(self, why: str, guest: GuestAddress | None = None) -> int:
        """Add a root port, on the guest's own root or behind an expander."""
        return self._add(why, GuestBus(len(self.buses), "root-port", guest))

    def add_slot(self, slot: RootPortSlot, guest: GuestAddress | None = None) -> None:
        """Add a port for a unit; several that share an address space get a bridge behind it."""
        if not slot.is_shared:
            port = self.add_port(_why_port(slot.first), guest)
            self.places[slot.first.name] = GuestAddress(port, 0, 0)
            return
        if len(slot.units) > len(_SLOTS_OF_BRIDGE):
            message = (
                f"{slot.names} share an IOMMU group: behind a virtual IOMMU they need one "
                f"bridge, which has {len(_SLOTS_OF_BRIDGE)} slots"
            )
            remedy = "assign fewer, or omit --viommu"
            refuse("viommu-bridge-full", slot.names, message, remedy)
        port = self.add_port(f"for the bridge of {slot.names}", guest)
        where = GuestBus(len(self.buses), "bridge", GuestAddress(port, 0, 0))
        group = f"IOMMU group {slot.first.iommu_group}"
        why = f"{slot.names} ({group}): one address space behind the guest's IOMMU"
        bridge = self._add(why, where)
        for number, unit in zip(_SLOTS_OF_BRIDGE, slot.units, strict=False):
            self.places[unit.name] = GuestAddress(bridge, number, 0)

    def add_expander(self, place: Place, bus_nr: int, slots: Sequence[RootPortSlot]) -> None:
        """Add a guest root complex for one of the host, with a port for each of its slots."""
        complex_name, node = place
        if len(slots) > _PORTS_OF_EXPANDER:
            message = (
                f"{len(slots)} devices are below {complex_name}, NUMA node {node}, but a guest "
                f"expander has {_PORTS_OF_EXPANDER} ports"
            )
            remedy = "assign some to another guest, or pass --numa off"
            refuse("expander-full", complex_name, message, remedy)
        cell = self._cells.index(node) if node is not None and node in self._cells else None
        where = f"{complex_name}" + (f", NUMA node {node}" if node is not None else "")
        why = f"{where}, like {slots[0].first.name} (numa_node in sysfs)"
        index = self._add(
            why, GuestBus(len(self.buses), "expander", first_number=bus_nr, cell=cell)
        )
        for number, slot in enumerate(slots):
            self.add_slot(slot, GuestAddress(index, number, 0))


def _why_port(unit: GuestDevice) -> str:
    group = f" (IOMMU group {unit.iommu_group})" if unit.iommu_group is not None else ""
    return f"for {unit.names}{group}"


_DEFAULT = 2 * MIB


def free_port_bytes(host: HostSnapshot, inside: Sequence[GuestDevice]) -> int:
    """The 32-bit memory that the largest other GPU or accelerator of the host needs.

    Firmware keeps 2 MiB of it behind a root port without a device. BARs that are not both 64-bit
    and prefetchable must fit into it when a device is attached: BAR 0 of NVIDIA's GPUs has 16 MiB
    or more. QEMU's root ports have the property mem-reserve for it.
    """
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
