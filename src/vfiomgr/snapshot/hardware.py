"""What facts say together about hardware: the memory of a GPU, and how the IOMMU is switched on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.host.kernel import parameters
from vfiomgr.listing import listed
from vfiomgr.pci.model import CLASS_ACCELERATOR, CLASS_DISPLAY, Bar, PciDevice
from vfiomgr.units import MIB, Version
from vfiomgr.value import Value

if TYPE_CHECKING:
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
    """An IOMMU platform: its name in firmware setups, and its parameters of the kernel."""

    firmware: str
    off: tuple[str, ...] = ()
    """The parameters that can switch it off."""
    on: str = ""


_OFF = {
    "intel_iommu": {"off"},
    "amd_iommu": {"off"},
    "iommu": {"off", "soft"},
    "acpi": {"off"},
    "arm-smmu.disable": {"1", "y", "Y", ""},
    "arm-smmu-v3.disable": {"1", "y", "Y", ""},
}
"""The values that switch an IOMMU off or keep the kernel from using it
(Documentation/admin-guide/kernel-parameters.txt; the last two are of vendors' kernels)."""
_BLACKLISTS = ("initcall_blacklist", "module_blacklist")
_VT_D = _Kind("VT-d", ("intel_iommu", "iommu", "acpi"), "intel_iommu=on")
_AMD = _Kind("AMD-Vi (IOMMU)", ("amd_iommu", "iommu", "acpi"))
_ARM = _Kind("the SMMU (IOMMU)", ("arm-smmu.disable", "arm-smmu-v3.disable"))
_OTHER = _Kind("the IOMMU")
_X86 = ("intel_iommu", "amd_iommu", "iommu", "acpi")
_UNKNOWN = _Kind("VT-d or AMD-Vi (IOMMU)", _X86, "intel_iommu=on")
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
_VIRTUAL = "on the host of this virtual machine, add {}"
_VIRTUAL_X86 = "a virtual IOMMU (libvirt: <iommu model='intel'/>, QEMU: -device intel-iommu)"
_VIRTUAL_ARM = "a virtual SMMU (libvirt: <iommu model='smmuv3'/>, QEMU: -machine virt,iommu=smmuv3)"
_WITHOUT_IORT = (
    "use firmware with the ACPI table IORT, which describes SMMUs and the isolation of interrupts "
    "(ITS), or a boot by device tree, if one of them enables an SMMU; else use another machine"
)
_XEN = "xl pci-assignable-add ADDRESS, then: xl pci-attach DOMAIN ADDRESS"
_QUBES = "qvm-pci attach --persistent QUBE dom0:BUS_DEVICE.FUNCTION"
_QUBES_WITHOUT_RESET = " (for a device that cannot be reset add: --option no-strict-reset=True)"


_PCIE_WITHOUT_IOMMU = {
    "brcm,bcm2711": "BCM2711 (Raspberry Pi 4, CM4)",
    "brcm,bcm2712": "BCM2712 (Raspberry Pi 5, CM5)",
    "raspberrypi,5-": "BCM2712 (Raspberry Pi 5, CM5)",
    "rockchip,rk3399": "RK3399",
    "rockchip,rk3566": "RK3566",
    "rockchip,rk3568": "RK3568",
}
"""SoCs by the beginning of a name in their device tree; there, no PCIe has an IOMMU
(arch/arm64/boot/dts). That of BCM2712 ignores requester IDs (raspberrypi/linux issue 6834)."""


def pcie_without_iommu(host: HostSnapshot) -> str | None:
    """What to do on a SoC without an IOMMU for PCIe; None for others."""
    pairs = (
        (n, soc)
        for n in host.kernel.compatible
        for start, soc in _PCIE_WITHOUT_IOMMU.items()
        if n.startswith(start)
    )
    for name, soc in pairs:
        return (
            f"use another machine, or virtio or macvtap devices in guests: this SoC, {soc}, has no "
            f"IOMMU for PCIe, so no PCI device can be assigned (device tree: {name})"
        )
    return None


def without_requester_ids(host: HostSnapshot) -> str | None:
    """The SoC, if a changed device tree may give its PCIe an IOMMU that ignores requester IDs."""
    names = ((name, soc) for name, soc in _PCIE_WITHOUT_IOMMU.items() if "BCM2712" in soc)
    known = host.kernel.compatible
    return next((soc for name, soc in names if any(k.startswith(name) for k in known)), None)


def iommu_remedy(host: HostSnapshot) -> str:
    """Return the instructions that enable the IOMMU of this host, by the cause.

    The kernel uses an AMD IOMMU or an SMMU as soon as the firmware describes it; an Intel IOMMU may
    need a kernel option (Documentation/admin-guide/kernel-parameters.txt).
    """
    if host.kernel.runs_on == "xen":
        if "qubes" not in (host.kernel.release or ""):
            return f"assign devices with Xen: {_XEN}"
        has_resets = all(d.reset_method for d in host.devices if not d.is_bridge)
        return f"assign devices with Xen: {_QUBES}{'' if has_resets else _QUBES_WITHOUT_RESET}"
    if without := pcie_without_iommu(host):
        return without
    words = command_line_words(host)
    steps = list(filter(None, (_before_boot(host, words), words)))
    look = "check dmesg for smmu" if _kind(host) is _ARM else "check dmesg for IOMMU"
    joint = "; in the virtual machine, " if host.kernel.runs_on == "guest" else ", "
    return f"{joint.join(steps) or look}; then reboot and run: vfiomgr groups"


def _before_boot(host: HostSnapshot, words: str | None) -> str | None:
    """Return what firmware, device tree or virtual machine lack; None if they describe an IOMMU.

    A firmware of Arm always has the table IORT, whether or not it has SMMUs.
    """
    kind, smmus = _kind(host), host.iommu.smmus
    setup = f"enable {kind.firmware} in the firmware setup"
    if host.iommu.firmware_tables:
        is_unread = kind is _ARM and smmus is None and words is None
        known = f"{setup} (the table IORT lists none)" if kind is _ARM and smmus == 0 else None
        return f"{setup}, or check dmesg for smmu if it is enabled" if is_unread else known
    if host.kernel.runs_on == "guest":
        return _VIRTUAL.format(_VIRTUAL_ARM if kind is _ARM else _VIRTUAL_X86)
    if not host.kernel.has_device_tree and kind is not _ARM:
        return setup
    if not host.kernel.has_device_tree and host.iommu.has_tables:
        return _WITHOUT_IORT
    if words is not None or not host.kernel.has_device_tree:
        return None
    return f"use a device tree that enables {kind.firmware} for PCIe, if this machine has one"


def command_line_words(host: HostSnapshot) -> str | None:
    """Return the necessary change of the kernel command line; None if there is none."""
    kind, text = _kind(host), host.kernel.command_line
    is_sure = kind in (_ARM, _OTHER) or _told(host) is not None
    is_on = _last_of_intel(text) == "on"
    off = [
        one.word
        for name in (kind.off if is_sure else _X86)
        if not (name == "intel_iommu" and is_on)
        for one in parameters(text, name)
        if not _OFF[name].isdisjoint(one.value.split(","))
    ]
    blacklists = [(n, one) for n in _BLACKLISTS for one in parameters(text, n)]
    parts: list[str] = []
    for name, one in blacklists:
        ours = [each for each in one.value.split(",") if _is_of_iommu(each)]
        if ",".join(ours) == one.value:
            off += [one.word] if ours else []
        elif ours:
            parts.append(f"remove {','.join(ours)} from {name}= on the kernel command line")
    if off or parts:
        words = [f"remove {' '.join(off)} from the kernel command line"] if off else []
        return ", ".join((*words, *parts))
    if kind.on and not is_on:
        which = " (on an Intel host)" if kind is _UNKNOWN else ""
        return f"add {kind.on} to the kernel command line{which}"
    return None


def _last_of_intel(text: str | None) -> str | None:
    """The value of intel_iommu= that counts (intel_iommu_setup in drivers/iommu/intel/iommu.c)."""
    values = (value for one in parameters(text, "intel_iommu") for value in one.value.split(","))
    return next((v for v in reversed(list(values)) if v in ("on", "off")), None)


def _is_of_iommu(name: str) -> bool:
    """Whether an initcall or a module belongs to a driver of IOMMUs."""
    return ("iommu" in name or "smmu" in name) and not name.startswith("vfio")


def _kind(host: HostSnapshot) -> _Kind:
    return _told(host) or _guessed(host)


def _told(host: HostSnapshot) -> _Kind | None:
    return next((_BY_TABLE[t] for t in host.iommu.firmware_tables if t in _BY_TABLE), None)


def _guessed(host: HostSnapshot) -> _Kind:
    """Guess the platform from CPU and architecture if no firmware table describes the IOMMU.

    A virtual machine with an x86 CPU of any vendor can have an Intel IOMMU.
    """
    kind = _BY_CPU.get((host.kernel.cpu_vendor or "").strip())
    if kind is None and any(name in (host.kernel.release or "") for name in _ARM_RELEASES):
        return _ARM
    kind = kind or _BY_ARCHITECTURE.get(host.kernel.architecture, _OTHER)
    return _VT_D if host.kernel.runs_on == "guest" and kind in (_AMD, _UNKNOWN) else kind


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
