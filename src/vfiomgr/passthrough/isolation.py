"""Safety checks of the IOMMU: what isolates a function from the rest of the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import READ_IT, Diagnostic, allow, blocker
from vfiomgr.host.kernel import parameters
from vfiomgr.listing import listed
from vfiomgr.paths import IOMMU_GROUPS, IOMMU_UNITS
from vfiomgr.pci.iommu import acs_redirect_words
from vfiomgr.pci.model import CLASS_DISPLAY, PciDevice
from vfiomgr.snapshot.hardware import (
    direct_mapping,
    gets_group_late,
    iommu_remedy,
    is_vt_d,
    pcie_without_iommu,
)
from vfiomgr.units import Version

if TYPE_CHECKING:
    from vfiomgr.snapshot.model import HostSnapshot


def iommu_unread(host: HostSnapshot) -> tuple[str, ...]:
    """The missing facts about the state of the IOMMU; empty if the state is known."""
    if host.iommu.is_known:
        return ()
    return (f"whether the IOMMU is on: the recording has neither {IOMMU_GROUPS} nor {IOMMU_UNITS}",)


def iommu_off(host: HostSnapshot) -> Diagnostic | None:
    """Return the diagnostic for a host without active IOMMU; None if the IOMMU is on."""
    if host.iommu.is_on:
        return None
    for text in iommu_unread(host):
        return blocker("iommu", "", f"cannot determine {text}", READ_IT)
    if host.kernel.runs_on == "xen":
        uses = "Xen uses the IOMMU: VFIO cannot assign devices in dom0"
        return blocker("iommu", "", uses, iommu_remedy(host))
    unsafe = (
        "; no-IOMMU mode is on, which lets a guest write to all of the host's memory"
        if host.vfio.is_noiommu_on
        else ""
    )
    return blocker(
        "iommu",
        "",
        "the IOMMU is off: this kernel has no IOMMU groups, so no device can be assigned" + unsafe,
        iommu_remedy(host),
    )


def isolation(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse a function without IOMMU group: a guest could write to all of the host's memory."""
    if host.iommu.is_on and device.iommu_group is None and not gets_group_late(host, device):
        yield blocker(
            "no-group",
            device,
            f"{device} has no IOMMU group and cannot be assigned",
            _covered(host, device),
        )


def _covered(host: HostSnapshot, device: PciDevice) -> str:
    """How a function gets an IOMMU group; those of chipset and CPU have no slot to be moved from.

    igfx_off leaves Intel's GPUs out (intel_iommu_setup in drivers/iommu/intel/iommu.c).
    """
    if without := pcie_without_iommu(host):
        return without
    given = parameters(host.kernel.command_line, "intel_iommu")
    is_intel_gpu = device.vendor_id == "8086" and device.class_code.startswith(CLASS_DISPLAY)
    if is_intel_gpu and any("igfx_off" in one.value.split(",") for one in given):
        return "remove igfx_off from intel_iommu= on the kernel command line, and reboot"
    if host.is_integrated(device):
        return "assign another device: no IOMMU covers this part of the chipset or CPU"
    return "move it to a slot that an IOMMU covers"


def reserved_region(host: HostSnapshot, device: PciDevice) -> Iterator[Diagnostic]:
    """Refuse a group with memory that the firmware wants mapped 1:1, as the kernel does."""
    found = direct_mapping(host, device.iommu_group)
    if found is None:
        return
    effect = "so the kernel refuses it for guests"
    if not found.is_refused:
        effect = "which this kernel may cut off when a guest gets the group"
    yield blocker(
        "reserved-region",
        f"IOMMU group {device.iommu_group}",
        f"IOMMU group {device.iommu_group} has memory that the firmware requires mapped 1:1 "
        f"({found}), {effect}",
        *_without_region(host, device),
        *(() if found.is_refused else (allow("reserved-region"),)),
        override=None if found.is_refused else "reserved-region",
    )


RELAXED = "relax_rmrr"
"""A value of intel_iommu= that only patched kernels read."""
_FIRST_PROXMOX_WITH_IT = Version(6, 5)


def _without_region(host: HostSnapshot, device: PciDevice) -> Iterator[str]:
    """What to do about a region that the kernel does not give up: no setting of Linux does."""
    other = "assign a device of another IOMMU group, or use another host"
    if not is_vt_d(host):
        yield f"ask the vendor for firmware without this region, or {other}"
        return
    is_network = device.class_code.startswith("02")
    if is_network and (host.kernel.machine_vendor or "").startswith("HP"):
        yield (
            "if it is a card in a slot, disable HP Shared Memory for it (System Configuration "
            "utility in the firmware setup, or conrep)"
        )
    values = parameters(host.kernel.command_line, "intel_iommu")
    release, version = host.kernel.release or "", host.kernel.version
    if any(RELAXED in one.value.split(",") for one in values):
        yield f"{other}: this kernel does not know intel_iommu={RELAXED}"
    elif "-pve" in release and version is not None and version >= _FIRST_PROXMOX_WITH_IT:
        yield (
            f"write intel_iommu=on,{RELAXED} on the kernel command line and reboot, if the "
            "firmware may lose its access to this memory"
        )
        yield other
    else:
        yield f"{other}; only kernels with the patch {RELAXED} assign it nevertheless"


SPAPR = "vfio_iommu_spapr_tce"
WITH_SPAPR = "boot a kernel with CONFIG_SPAPR_TCE_IOMMU and CONFIG_VFIO_IOMMU_SPAPR_TCE"


def missing_backend(host: HostSnapshot) -> Iterator[Diagnostic]:
    """Refuse a kernel for POWER without the only backend of VFIO for its IOMMUs.

    See drivers/vfio/Kconfig: VFIO_IOMMU_SPAPR_TCE depends on SPAPR_TCE_IOMMU.
    """
    if is_power(host) and host.vfio_modules is not None and SPAPR not in host.vfio_modules:
        yield blocker(
            "iommu-backend",
            "",
            f"this kernel has no {SPAPR}, with which VFIO maps a guest's memory on POWER",
            WITH_SPAPR,
        )


TOGETHER = "the group must be assigned together"
ENABLE_ACS = "enable ACS in the firmware setup"
_PORT = "0604"


def why_together(host: HostSnapshot, number: int | None) -> str:
    """Why the functions of a group are assigned together, with what joins them if it is seen."""
    if is_power(host):
        return f"{TOGETHER}: it is a partitionable endpoint (PE), which the platform fixes"
    ports = [str(port.address) for port in _joining(host, number)]
    if not ports:
        return TOGETHER
    return f"{TOGETHER}: what is behind {listed(ports, 3)} is not isolated (no ACS)"


def separating(
    host: HostSnapshot, own: Sequence[PciDevice], what: str = "the device"
) -> Iterator[str]:
    """How functions of a group can get one without the other members.

    Another slot does not separate the functions of one card. If all ports are in one group, none
    is known to have another.
    """
    members, ports = host.group_members(own[0].iommu_group), _joining(host, own[0].iommu_group)
    if all(device.is_nvswitch for device in own):
        yield "leave the NVSwitches on the host with NVIDIA's Fabric Manager"
        return
    words = acs_redirect_words(host.kernel.command_line)
    if words and ports:
        yield f"remove {' '.join(words)} from the kernel command line and reboot"
        return
    slots = {d.address.slot for d in members if not d.is_bridge}
    others = [d for d in host.devices if d.class_code.startswith(_PORT) and d not in members]
    is_movable = not (is_power(host) or all(map(host.is_integrated, own)))
    if is_movable and (others or len(ports) < 2) and (ports or len(slots) > 1):  # noqa: PLR2004 - several
        yield f"move {what} to a slot with its own group"
    if ports:
        yield f"{ENABLE_ACS}, which newer firmware may offer"


def is_power(host: HostSnapshot) -> bool:
    """Whether IOMMUs and groups are those of POWER (arch/powerpc/platforms/powernv/pci-ioda.c)."""
    return (host.kernel.architecture or "").startswith("ppc64")


def _joining(host: HostSnapshot, number: int | None) -> list[PciDevice]:
    """The uppermost ports of a group that have other members behind them.

    A function is in the group of a port above it only if a port there has no ACS
    (pci_device_group in drivers/iommu/iommu.c). None for conventional PCI, which has no ACS: only
    it has several device numbers on a bus.
    """
    members = {str(device.address): device for device in host.group_members(number)}
    is_conventional = any(
        d.address.device and not (d.is_bridge or d.is_on_root_bus or d.physical_function)
        for d in members.values()
    )
    if is_power(host) or is_conventional:
        return []
    above = (each.bridge_path.split("/") for each in members.values())
    tops = {next((name for name in path if name in members), None) for path in above}
    return [device for name, device in members.items() if name in tops]
