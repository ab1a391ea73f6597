"""Plan what every guest needs for its devices, from a snapshot and a request; pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import refuse
from vfiomgr.guests import arm
from vfiomgr.guests.cores import with_own_cpus
from vfiomgr.guests.memory import needed_lock, plan_mmio_window
from vfiomgr.guests.model import GuestCpus, GuestMemory, GuestPlan, MmioWindow
from vfiomgr.guests.numa import Nodes, lay_nodes
from vfiomgr.guests.nvlink import nvlink_notes
from vfiomgr.guests.placement import (
    free_port_bytes,
    lay_buses,
    slots_of,
    space_notes,
    with_port_memory,
    without_hotplug,
)

if TYPE_CHECKING:
    from vfiomgr.guests.model import Architecture, GuestDevice, GuestRequest, Reason
    from vfiomgr.guests.placement import Buses, RootPortSlot
    from vfiomgr.snapshot.model import HostSnapshot

_ARCHITECTURES: dict[str | None, Architecture] = {
    None: "x86_64",
    "x86_64": "x86_64",
    "aarch64": "aarch64",
}


def plan_guest(
    host: HostSnapshot,
    request: GuestRequest,
    units: Sequence[GuestDevice],
    *,
    emulated: int = 0,
    has_port_memory: bool = True,
) -> GuestPlan:
    """Plan the places of these devices, memory and CPUs near them, and a window for their BARs.

    `emulated` is the number of other devices behind root ports. Without `has_port_memory` free
    ports keep what firmware reserves by default.

    Raises:
        Refusal: the host does not support it; the message names the remedy.
    """
    architecture = architecture_of(host)
    seen = [unit for unit in units if unit.is_seen]
    nodes = with_own_cpus(lay_nodes(host, request, seen), host.topology, request)
    window, why_window, window_notes = _window(host, request, seen, emulated, architecture)
    memory = arm.with_device_memory(request, units, nodes.cells, nodes.host_nodes)
    has_viommu = request.viommu not in (None, "smmuv3")
    slots = slots_of([unit for unit in memory.units if unit.is_seen], has_viommu=has_viommu)
    buses = _buses(request, slots, nodes, emulated)
    if has_port_memory:
        buses = with_port_memory(buses, request.spare_ports, free_port_bytes(host, seen))
    functions = sum(len(unit.function_names) for unit in seen)
    return GuestPlan(
        architecture=architecture,
        devices=memory.units,
        buses=buses.buses,
        places=buses.places,
        memory=GuestMemory(
            cells=memory.cells,
            mode="preferred" if request.numa == "preferred" else "strict",
            host_nodes=nodes.host_nodes,
            locked_bytes=needed_lock(
                request.memory_bytes, functions, has_viommu=request.viommu is not None
            ),
        ),
        cpus=_cpus(request, nodes),
        window=window,
        reasons=tuple(chain(buses.reasons, nodes.reasons, why_window, memory.reasons)),
        notes=tuple(
            chain(
                _architecture_notes(host, architecture),
                nodes.notes,
                window_notes,
                space_notes(slots),
                _group_notes(host, memory.units),
                nvlink_notes(host, seen),
            )
        ),
    )


def architecture_of(host: HostSnapshot) -> Architecture:
    """The architecture of the guest, which is that of the host; others are refused."""
    if host.kernel.architecture is None and any(map(arm.is_coherent, host.devices)):
        return "aarch64"
    if host.kernel.architecture not in _ARCHITECTURES:
        message = (
            f"cannot plan a guest for {host.kernel.architecture}: "
            "only x86_64 (q35) and aarch64 (virt) are supported"
        )
        remedy = (
            "create the domain with virt-install, then add devices: vfiomgr libvirt edit FILE "
            "--add ADDRESS; vfiomgr libvirt hostdev prints only the devices"
        )
        refuse("domain-architecture", "", message, remedy)
    return _ARCHITECTURES[host.kernel.architecture]


def _architecture_notes(host: HostSnapshot, architecture: Architecture) -> Iterator[str]:
    """Name the architecture that is assumed where the host does not show its own."""
    if host.kernel.architecture is None and architecture != arm.ARM:
        yield (
            f"the CPU architecture of this host is unknown: assuming {architecture} (machine q35); "
            "if it is another, add /proc/cpuinfo to the recording, or pass --snapshot of that host"
        )


def _window(
    host: HostSnapshot,
    request: GuestRequest,
    units: Sequence[GuestDevice],
    emulated: int,
    architecture: Architecture,
) -> tuple[MmioWindow, tuple[Reason, ...], tuple[str, ...]]:
    """The window for BARs; that of an ARM machine has a fixed size, and is checked."""
    if architecture != arm.ARM:
        return plan_mmio_window(host, request, units, emulated)
    reason = arm.check_window(request, units, emulated)
    return MmioWindow(), (reason,), ()


def _buses(
    request: GuestRequest, slots: Sequence[RootPortSlot], nodes: Nodes, emulated: int
) -> Buses:
    laid = lay_buses(
        slots,
        emulated,
        request.spare_ports,
        [cell.host_node for cell in nodes.cells],
        is_local=request.numa != "off",
        is_apart=request.viommu == "smmuv3",
    )
    return laid if request.has_hotplug else without_hotplug(laid)


def _cpus(request: GuestRequest, nodes: Nodes) -> GuestCpus:
    """One socket per cell with CPUs, if all cells have equally many."""
    counts = {len(cell.cell.cpus) for cell in nodes.cells if cell.cell.cpus}
    sockets = sum(bool(cell.cell.cpus) for cell in nodes.cells) if len(counts) == 1 else 1
    return GuestCpus(
        sockets=max(1, sockets),
        cores=request.vcpus // max(1, sockets) // nodes.threads,
        threads=nodes.threads,
        pins=nodes.pins,
        emulator=nodes.emulator,
    )


def _group_notes(host: HostSnapshot, units: Sequence[GuestDevice]) -> Iterator[str]:
    """Note the other functions of the groups, which nobody else can use while the guest runs."""
    inside = {function.address for unit in units for function in unit.functions}
    groups = {unit.iommu_group for unit in units if unit.functions} - {None}
    for number in sorted(group for group in groups if group is not None):
        idle = [
            member
            for member in host.group_members(number)
            if member.address not in inside and not member.is_bridge
        ]
        if idle:
            shown = ", ".join(map(str, idle))
            pronoun = "it" if len(idle) == 1 else "them"
            yield (
                f"IOMMU group {number} also contains {shown}: neither the host nor another guest "
                f"can use {pronoun} while this guest runs"
            )
