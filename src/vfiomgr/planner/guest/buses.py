"""Where devices sit in the guest: root ports, and expanders that carry the host's locality."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal
from vfiomgr.model.domain import EXPANDER, ROOT_PORT, GuestAddress, PciController
from vfiomgr.model.guest import Reason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.planner.guest.units import Unit

ROOT = "pcie-root"
_PORTS_OF_EXPANDER = 32
"""Slots of its bus (virDomainPCIAddressBusSetModel in conf/domain_addr.c of libvirt)."""
_BUSES = 256

Place = tuple[str | None, int | None]
"""A root complex of the host and a NUMA node of it."""


@dataclass(frozen=True, slots=True)
class Buses:
    """The controllers of a guest, and the bus of each unit in their order."""

    controllers: tuple[PciController, ...]
    of_units: tuple[int, ...]
    reasons: tuple[Reason, ...]


def lay_buses(
    units: Sequence[Unit], others: int, spare: int, cells: Sequence[int], *, is_local: bool
) -> Buses:
    """A root port for each unit; behind expanders where the units come from several places.

    `others` is how many emulated devices libvirt will put behind root ports, `spare` how many ports
    stay free; `cells` are the host's nodes by the guest's cells.

    Raises:
        Refusal: the guest has not so many buses.

    """
    laying = _Laying(cells)
    places = _places(units) if is_local else ()
    expanded = places if len(places) > 1 or len(cells) > 1 else ()
    inner = [unit for unit in units if _place(unit) not in expanded]
    for unit in inner:
        laying.add_port(unit)
    for _ in range(others):
        laying.add_port(None, "for a disk, a network or another emulated device")
    for _ in range(spare):
        laying.add_port(None, "free, for a device that is attached later")
    numbers = _bus_numbers(expanded, units)
    if min(numbers, default=_BUSES) < len(laying.controllers):
        message = f"{len(units)} devices and {others + spare} more root ports are too many buses"
        raise Refusal(message, "a guest has 256: ask for fewer --spare-ports or devices")
    for place, number in zip(expanded, numbers, strict=True):
        laying.add_expander(place, number, [unit for unit in units if _place(unit) == place])
    return Buses(
        tuple(laying.controllers),
        tuple(laying.bus_of[unit.name] for unit in units),
        tuple(laying.reasons),
    )


def _bus_numbers(places: Sequence[Place], units: Sequence[Unit]) -> list[int]:
    """Of expanders, up to the last bus: each leaves as many as it has ports."""
    numbers, end = [], _BUSES
    for place in reversed(places):
        end -= 1 + sum(_place(unit) == place for unit in units)
        numbers.append(end)
    return numbers[::-1]


def _place(unit: Unit) -> Place:
    return (unit.root_complex, unit.numa_node)


def _places(units: Sequence[Unit]) -> tuple[Place, ...]:
    """The root complexes with their nodes, in the order of the devices."""
    return tuple(dict.fromkeys(_place(unit) for unit in units if unit.root_complex is not None))


class _Laying:
    """Controllers one after the other; a controller's index is its place in the list."""

    def __init__(self, cells: Sequence[int]) -> None:
        self._cells = cells
        self.controllers = [PciController(0, 0, ROOT)]
        self.reasons: list[Reason] = []
        self.bus_of: dict[str, int] = {}

    def _add(self, why: str, controller: PciController) -> int:
        self.controllers.append(controller)
        self.reasons.append(Reason(f"controller {controller.index}", why))
        return controller.index

    def add_port(self, unit: Unit | None, why: str = "", guest: GuestAddress | None = None) -> None:
        """A root port, on the guest's own root or behind an expander."""
        index = len(self.controllers)
        self._add(why or _why_port(unit), PciController(0, index, ROOT_PORT, guest))
        if unit is not None:
            self.bus_of[unit.name] = index

    def add_expander(self, place: Place, bus_nr: int, units: Sequence[Unit]) -> None:
        """A root complex of the guest for one of the host, with a port for each of its units."""
        complex_name, node = place
        if len(units) > _PORTS_OF_EXPANDER:
            message = (
                f"{len(units)} devices are below {complex_name}, NUMA node {node}, and an expander "
                f"of a guest has {_PORTS_OF_EXPANDER} ports"
            )
            raise Refusal(message, "give some to another guest, or pass --numa off")
        cell = self._cells.index(node) if node is not None and node in self._cells else None
        where = f"{complex_name}" + (f", NUMA node {node}" if node is not None else "")
        why = f"{where}, as {units[0].name} has it (numa_node in sysfs)"
        index = self._add(
            why,
            PciController(0, len(self.controllers), EXPANDER, bus_nr=bus_nr, numa_node=cell),
        )
        for slot, unit in enumerate(units):
            self.add_port(unit, guest=GuestAddress(index, slot, 0))


def _why_port(unit: Unit | None) -> str:
    if unit is None:
        return ""
    group = f" (IOMMU group {unit.iommu_group})" if unit.iommu_group is not None else ""
    return f"for {unit.names}{group}"
