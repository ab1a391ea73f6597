"""Guests of ARM servers: the window of machine virt, and the memory of NVIDIA's Grace GPUs.

The 64-bit window of the machine has 512 GiB (VIRT_HIGH_PCIE_MMIO in hw/arm/virt.c of QEMU). A GPU
whose memory is coherent with the CPU's has eight NUMA nodes of its own, one for each MIG instance,
which its driver in the guest adds (-object acpi-generic-initiator).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import refuse
from vfiomgr.guests.model import GuestCell, GuestDevice, GuestRequest, NumaCell, Reason
from vfiomgr.pci.memory import bar_window
from vfiomgr.units import GIB, format_cpulist, size
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.pci.model import PciDevice

ARM = "aarch64"
_WINDOW = 512 * GIB
_CELLS_OF_GPU = 8
_COHERENT = "nvgrace"
_GRACE = frozenset({"2342", "2345", "2348", "2941", "31c2"})
"""GH200, GB200 and GB300 (drivers/vfio/pci/nvgrace-gpu/main.c)."""
_ANYWHERE = -1
"""The host node of memory that is not bound, or that a cell does not have."""


def check_window(request: GuestRequest, units: Sequence[GuestDevice], emulated: int) -> Reason:
    """The reason why the BARs fit into the machine's window.

    Raises:
        Refusal: they do not.
    """
    needed = bar_window([unit.functions for unit in units], emulated)
    if needed > _WINDOW:
        message = f"BARs need a window of {size(needed)}, but machine virt has {size(_WINDOW)}"
        refuse("aperture-too-small", request.name, message, "assign fewer of these devices")
    return Reason("firmware", f"BARs need {size(needed)} of machine virt's {size(_WINDOW)}")


class DeviceMemory(Value):
    """Devices with cells for their own memory, and those cells."""

    units: tuple[GuestDevice, ...]
    cells: tuple[GuestCell, ...] = ()
    reasons: tuple[Reason, ...] = ()


def with_device_memory(
    request: GuestRequest,
    units: Sequence[GuestDevice],
    cells: tuple[GuestCell, ...],
    host_nodes: Sequence[int],
) -> DeviceMemory:
    """Give each coherent GPU eight memoryless cells, after those with memory and CPUs."""
    coherent = [unit for unit in units if unit.is_seen and any(map(is_coherent, unit.functions))]
    wanting = [unit for unit in coherent if unit.options.acpi_nodes is None]
    if not wanting:
        return DeviceMemory(tuple(units), cells)
    if not cells:
        all_cpus = frozenset(range(request.vcpus))
        place = host_nodes[0] if host_nodes else _ANYWHERE
        cells = (GuestCell(NumaCell(0, request.memory_bytes, all_cpus), place),)
    reasons, changed = [], {}
    for unit in wanting:
        own = range(len(cells), len(cells) + _CELLS_OF_GPU)
        cells += tuple(GuestCell(NumaCell(number, 0), _ANYWHERE) for number in own)
        nodes = format_cpulist(own)
        options = replace(unit.options, acpi_nodes=nodes)
        changed[unit.name] = replace(unit, options=options)
        text = f"cells {nodes} are for its memory, which its driver in the guest adds"
        reasons.append(Reason(f"device {unit.name}", text))
    return DeviceMemory(tuple(changed.get(u.name, u) for u in units), cells, tuple(reasons))


def is_coherent(function: PciDevice) -> bool:
    """Whether its memory is coherent with the CPU's: GPUs of Grace, by their variant of VFIO."""
    return (function.driver or "").startswith(_COHERENT) or (
        function.vendor_id == "10de" and function.device_id in _GRACE
    )
