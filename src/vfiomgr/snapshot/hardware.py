"""What facts say together about hardware: the memory of a GPU, and how the IOMMU is switched on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.listing import listed
from vfiomgr.pci.model import CLASS_ACCELERATOR, CLASS_DISPLAY
from vfiomgr.units import MIB, Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vfiomgr.pci.model import Bar, PciDevice
    from vfiomgr.snapshot.model import HostSnapshot

_WINDOW = 256 * MIB
"""The size of the BAR that GPUs show of their memory where it is not resized."""
_INTEL = "8086"


class GpuMemory(Value):
    """The memory of a GPU in MiB; where it `is_certain`, else so much at most."""

    mib: int
    is_certain: bool

    def __str__(self) -> str:
        """`16G`, or `<=64G`, or `15356M`."""
        whole, rest = divmod(self.mib, 1024)
        size = f"{self.mib}M" if rest else f"{whole}G"
        return size if self.is_certain else f"<={size}"


def memory_of(host: HostSnapshot, device: PciDevice) -> GpuMemory | None:
    """The memory of a GPU; None where nothing shows it, and of virtual functions.

    What drivers report is certain. A BAR that shows all of it has the next power of two as its
    size, so that it is an upper bound.
    """
    is_gpu = device.class_code.startswith((CLASS_DISPLAY, CLASS_ACCELERATOR))
    if not is_gpu or device.is_bridge or device.physical_function is not None:
        return None
    known = max(_reported(host, device), default=0)
    if known:
        return GpuMemory(known, is_certain=True)
    size = max((bar.size for bar in device.bars if _shows_all(device, bar)), default=0)
    return GpuMemory(size // MIB, is_certain=False) if size else None


def _reported(host: HostSnapshot, device: PciDevice) -> Iterator[int]:
    """MiB, as amdgpu, nvidia-smi, Intel's quotas and NVIDIA's vGPU types have it."""
    if device.vram is not None:
        yield device.vram // MIB
    mode, quotas = host.vgpus.mode_of(device), host.vgpus.quotas_of(device)
    if mode is not None and mode.framebuffer is not None:
        yield mode.framebuffer
    if quotas is not None and quotas.memory is not None:
        yield quotas.memory // MIB
    for kind in host.vgpus.types_of(str(device.address)):
        if kind.series and kind.framebuffer and kind.max_instances:
            yield kind.framebuffer * kind.max_instances


def _shows_all(device: PciDevice, bar: Bar) -> bool:
    """Whether a BAR is a window to all of the memory of its GPU, and not to a part of it.

    A BAR that can be resized shows all at its largest size. Linux before 6.1 does not report
    sizes; there, a BAR that was never resized has 256 MiB. The BAR of Intel's integrated GPUs is
    a window to memory of the host.
    """
    if not (bar.is_memory and bar.is_64bit and bar.is_prefetchable):
        return False
    if device.vendor_id == _INTEL and device.is_on_root_bus:
        return False
    return bar.size == bar.largest if bar.largest is not None else bar.size > _WINDOW


class DirectMapping(Value):
    """Memory that the firmware wants mapped 1:1 for members of an IOMMU group (RMRR, IVMD, RMR)."""

    regions: tuple[str, ...]
    is_refused: bool
    """Whether the kernel refuses the group to VFIO; otherwise a guest cuts the firmware off."""

    def __str__(self) -> str:
        """`f4000-f4fff`, with the number of others."""
        return listed(self.regions, _SHOWN)


_SHOWN = 2
_FIRST_RELAXABLE = Version(5, 3)
_FIRST_REFUSED = Version(6, 6)
_USB = "0c03"


def direct_mapping(host: HostSnapshot, number: int | None) -> DirectMapping | None:
    """The memory of type `direct` of a group; None if there is none, or if it is unknown.

    Since Linux 6.6 no such group can be claimed (require_direct in drivers/iommu/iommu.c). Before,
    only VT-d refused it (device_is_rmrr_locked in intel/iommu.c), except for displays and USB
    controllers, whose memory is `direct-relaxable` only since Linux 5.3 (device_rmrr_is_relaxable).
    """
    group = host.group(number)
    if group is None or not group.direct_regions:
        return None
    kernel = host.kernel.version
    is_refused = kernel is not None and kernel >= _FIRST_REFUSED
    if not is_refused and is_vt_d(host):
        members = [d for d in host.group_members(number) if not d.is_bridge]
        locked = [d for d in members if not d.class_code.startswith((CLASS_DISPLAY, _USB))]
        is_typed = kernel is not None and kernel >= _FIRST_RELAXABLE
        if not (is_typed or locked):
            return None
        is_refused = is_typed or len(locked) == len(members)
    return DirectMapping(group.direct_regions, is_refused)


def is_vt_d(host: HostSnapshot) -> bool:
    """Whether the IOMMUs of this host are Intel's."""
    return any(unit.startswith("dmar") for unit in host.iommu.units)


class _Kind(Value):
    """An IOMMU platform: its name in firmware setups, and its kernel options."""

    firmware: str
    off: frozenset[str] = frozenset()
    on: str = ""


_VT_D = _Kind("VT-d", frozenset({"intel_iommu=off", "iommu=off"}), "intel_iommu=on")
_AMD = _Kind("AMD-Vi (IOMMU)", frozenset({"amd_iommu=off", "iommu=off"}))
_ARM = _Kind("the SMMU (IOMMU)")
_OTHER = _Kind("the IOMMU")
_OFF = _VT_D.off | _AMD.off
_UNKNOWN = _Kind("VT-d or AMD-Vi (IOMMU)", _OFF, "intel_iommu=on")
_BY_TABLE = {"DMAR": _VT_D, "IVRS": _AMD, "IORT": _ARM}
_BY_CPU = {
    "GenuineIntel": _VT_D,
    "CentaurHauls": _VT_D,
    "Shanghai": _VT_D,
    "AuthenticAMD": _AMD,
    "HygonGenuine": _AMD,
}
"""Zhaoxin CPUs have an Intel-compatible IOMMU, Hygon CPUs an AMD-compatible one."""
_BY_ARCHITECTURE = {None: _UNKNOWN, "x86_64": _UNKNOWN, "aarch64": _ARM}
_ARM_RELEASES = ("arm64", "aarch64")
_FIRST_WITH_EARLY_GROUPS = Version(6, 15)
"""Since bcb81ac6ae3c in drivers/iommu/iommu.c; before, a probe reads IORT and device trees."""


def iommu_remedy(host: HostSnapshot) -> str:
    """Return the instructions that enable the IOMMU of this host.

    The kernel uses an AMD IOMMU or an SMMU as soon as the firmware describes it; an Intel IOMMU may
    need a kernel option (Documentation/admin-guide/kernel-parameters.txt).
    """
    kind = _kind(host)
    steps = [] if host.iommu.firmware_tables else [f"enable {kind.firmware} in the firmware setup"]
    words = command_line_words(host)
    if words is not None:
        steps.append(words)
    look = "check dmesg for smmu" if kind is _ARM else "check dmesg for IOMMU"
    return f"{', '.join(steps) or look}; then reboot and run: vfiomgr groups"


def command_line_words(host: HostSnapshot) -> str | None:
    """Return the necessary change of the kernel command line; None if there is none."""
    kind = _kind(host)
    off = kind.off if _told(host) else _OFF
    switched_off = [word for word in host.kernel.words if word in off]
    if switched_off:
        return f"remove {' '.join(switched_off)} from the kernel command line"
    if kind.on and kind.on not in host.kernel.words:
        which = " (on an Intel host)" if kind is _UNKNOWN else ""
        return f"add {kind.on} to the kernel command line{which}"
    return None


def _kind(host: HostSnapshot) -> _Kind:
    return _told(host) or _guessed(host)


def _told(host: HostSnapshot) -> _Kind | None:
    return next((_BY_TABLE[t] for t in host.iommu.firmware_tables if t in _BY_TABLE), None)


def _guessed(host: HostSnapshot) -> _Kind:
    """Guess the platform from CPU and architecture if no firmware table describes the IOMMU."""
    cpu = _BY_CPU.get((host.kernel.cpu_vendor or "").strip())
    if cpu is not None:
        return cpu
    if any(name in (host.kernel.release or "") for name in _ARM_RELEASES):
        return _ARM
    return _BY_ARCHITECTURE.get(host.kernel.architecture, _OTHER)


def gets_group_late(host: HostSnapshot, device: PciDevice) -> bool:
    """Whether the kernel assigns the IOMMU group only when a driver is bound.

    Kernels of ARM before Linux 6.15 do (iort_iommu_configure_id and of_iommu_configure, called by
    pci_dma_configure). vfio-pci refuses a function that has none then, but for no-IOMMU mode.
    """
    if device.driver is not None or device.iommu_group is not None or host.vfio.is_noiommu_on:
        return False
    kernel = host.kernel.version
    is_early = kernel is not None and kernel >= _FIRST_WITH_EARLY_GROUPS
    return host.iommu.is_on and _kind(host) is _ARM and not is_early
