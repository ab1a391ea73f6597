"""Domains of ARM servers: machine virt with GICv3, SMMUv3, and the memory of NVIDIA's Grace GPUs.

The 64-bit window of the machine has 512 GiB (VIRT_HIGH_PCIE_MMIO in hw/arm/virt.c of QEMU), and it
has up to 512 CPUs. A GPU whose memory is coherent with the CPU's has eight NUMA nodes of its own,
one for each MIG instance, which its driver in the guest adds (-object acpi-generic-initiator). An
accelerated SMMUv3 serves one root complex of the guest, and needs iommufd (hw/arm/smmuv3-accel.c).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.diagnostic import refuse
from vfiomgr.errors import UsageError
from vfiomgr.guests.device import GuestDevice
from vfiomgr.libvirt.build.model import GuestCell, Reason
from vfiomgr.libvirt.model import ACPI_NODESET, EXPANDER, SMMU_ACCEL, DomainIommu, NumaCell
from vfiomgr.pci.memory import bar_window
from vfiomgr.units import GIB, format_cpulist, size
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.libvirt.build.model import DomainRequest
    from vfiomgr.libvirt.build.pci_topology import Buses
    from vfiomgr.libvirt.model import GuestHostdev
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.units import Version

ARM = "aarch64"
_WINDOW = 512 * GIB
_MOST_VCPUS = 512
_CELLS_OF_GPU = 8
_COHERENT = "nvgrace"
_GRACE = frozenset({"2342", "2345", "2348", "2941", "31c2"})
"""GH200, GB200 and GB300 (drivers/vfio/pci/nvgrace-gpu/main.c)."""
_ANYWHERE = -1
"""The host node of memory that is not bound, or that a cell does not have."""


def check_request(request: DomainRequest) -> None:
    """Refuse options that only PCs have.

    Windows for ARM runs in such a machine (win-11 of osinfo-db), with virtio drivers (issue 177 of
    virtio-win/kvm-guest-drivers-windows). The Hyper-V interfaces are properties of x86 CPUs
    (target/i386 of QEMU).

    Raises:
        UsageError: one of them is given.
        Refusal: there are too many CPUs.

    """
    wrong = {
        "--firmware bios": request.firmware == "bios",
        "--hide-kvm": request.hides_kvm,
        "--secure-boot": request.has_secure_boot,
        f"--launch-security {request.launch_security}": request.launch_security is not None,
        "--fixed-aperture": request.has_fixed_aperture,
        "--address-bits": request.address_bits is not None,
        f"--viommu {request.viommu}": request.viommu in ("intel", "amd"),
        "--disk …,bus=sata": any(disk.bus == "sata" for disk in request.disks),
        "the device option vga": any(d.options.has_vga for d in request.devices),
    }
    for option in (option for option, is_given in wrong.items() if is_given):
        message = f"cannot use {option} for {ARM}: machine virt does not support it"
        raise UsageError(message, "omit it")
    if request.is_windows:
        message = (
            f"cannot use --os windows for {ARM}: it writes the Hyper-V interfaces, timers and SATA "
            "disks of PCs"
        )
        remedy = (
            "omit it: the domain also runs Windows for ARM, with the ARM64 drivers of virtio-win "
            "for disks and networks"
        )
        raise UsageError(message, remedy)
    if request.vcpus > _MOST_VCPUS:
        message = f"{request.vcpus} CPUs are too many: machine virt supports {_MOST_VCPUS}"
        refuse("too-many-cpus", request.name, message, f"pass --vcpus {_MOST_VCPUS}")


def check_window(request: DomainRequest, units: Sequence[GuestDevice], emulated: int) -> Reason:
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
    request: DomainRequest,
    units: Sequence[GuestDevice],
    cells: tuple[GuestCell, ...],
    host_nodes: Sequence[int],
    libvirt: Version,
) -> DeviceMemory:
    """Give each coherent GPU eight memoryless cells, after those with memory and CPUs.

    Raises:
        Refusal: this libvirt does not have them.

    """
    coherent = [unit for unit in units if unit.is_seen and any(map(is_coherent, unit.functions))]
    wanting = [unit for unit in coherent if unit.options.acpi_nodes is None]
    if not wanting:
        return DeviceMemory(tuple(units), cells)
    ACPI_NODESET.require(libvirt, f"the memory of {wanting[0].name}")
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
        reasons.append(Reason(f"hostdev {unit.name}", text))
    return DeviceMemory(tuple(changed.get(u.name, u) for u in units), cells, tuple(reasons))


def is_coherent(function: PciDevice) -> bool:
    """Whether its memory is coherent with the CPU's: GPUs of Grace, by their variant of VFIO."""
    return (function.driver or "").startswith(_COHERENT) or (
        function.vendor_id == "10de" and function.device_id in _GRACE
    )


def smmus_of(
    request: DomainRequest, buses: Buses, hostdevs: Sequence[GuestHostdev], libvirt: Version
) -> tuple[tuple[DomainIommu, ...], tuple[Reason, ...]]:
    """An accelerated SMMUv3 for each expander; without devices, one that is emulated.

    Raises:
        Refusal: this libvirt has none that works with host devices.

    """
    if request.viommu != "smmuv3":
        return (), ()
    if not any(not planned.device.is_unassigned for planned in hostdevs):
        return (DomainIommu("smmuv3"),), ()
    SMMU_ACCEL.require(libvirt, "an SMMUv3 for host devices")
    expanders = [c.index for c in buses.controllers if c.model == EXPANDER]
    text = "accelerated by the host's SMMUv3, which must be that of all devices behind its bus"
    return (
        tuple(DomainIommu("smmuv3", bus=index, is_accelerated=True) for index in expanders),
        (Reason("iommu", text),),
    )
