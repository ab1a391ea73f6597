"""Whether a device can migrate with its guest, and why not.

QEMU asks the kernel (VFIO_DEVICE_FEATURE_MIGRATION), which answers with the driver's migration
operations (`mig_ops`, drivers/vfio/vfio_main.c). debugfs shows the same; without it the driver's
name tells: of drivers/vfio/pci the variants below have such operations, vfio-pci, nvgrace-gpu and
ism have none. Only virtual functions have them: mlx5, virtio, xe and hisilicon check `is_virtfn`,
and the probe of qat and pds fails for others (pci_iov_vf_id). NVIDIA's vGPU driver has its own
(mdev and vendor-specific VFIO), from Linux 5.18.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.pci.drivers import best_variant
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.pci.guest_support import MigrationState
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.model import Vgpu

CONDITIONS = {
    "mlx5_vfio_pci": "the function must be migratable: devlink port function set PORT migratable "
    "enable, before it is bound (Linux 6.2)",
    "hisi_acc_vfio_pci": "",
    "pds_vfio_pci": "",
    "qat_vfio_pci": "",
    "xe_vfio_pci": "",
    "virtio_vfio_pci": "the device must offer its state to the administration queue",
}
"""Variant drivers that migrate virtual functions, and what else it depends on."""
_FIRST_KERNEL = Version(5, 18)
"""The first kernel with the interface of migration that QEMU 8.1 uses (VFIO_MIGRATION v2)."""


class Migratability(Value):
    """Whether a device can migrate."""

    is_possible: bool | None
    """None if unknown."""
    why: str
    """The driver that can or cannot, without the name of the device."""
    condition: str = ""
    """What it depends on besides, that vfiomgr cannot see."""
    remedy: str = ""
    """The command after which it is possible, or what can migrate instead."""
    features: tuple[str, ...] | None = None
    """As MigrationState.features; None if unknown."""
    state: str | None = None
    """As MigrationState.state."""
    evidence: tuple[str, ...] = ()
    """What was read, and where."""

    @property
    def has_p2p(self) -> bool | None:
        """Whether it can be one of several devices of a guest; None if unknown."""
        return None if self.features is None else "p2p" in self.features

    def __str__(self) -> str:
        """`yes: mlx5_vfio_pci migrates it (stop-copy, p2p)`."""
        word = {True: "not yet" if self.remedy else "yes", False: "no", None: "unknown"}
        return f"{word[self.is_possible]}: {self.reason}"

    @property
    def reason(self) -> str:
        """`mlx5_vfio_pci migrates it (stop-copy, p2p)`."""
        told = f" ({', '.join(self.features)})" if self.features else ""
        return "; ".join(
            part for part in (f"{self.why}{told}", self.condition, self.remedy) if part
        )


def migratability_of(host: HostSnapshot, device: PciDevice) -> Migratability:
    """Whether a function can migrate, as it is now or on its best VFIO driver."""
    name = str(device.address)
    driver = device.driver or "no driver"
    link = f"/sys/bus/pci/devices/{name}/driver: {driver}"
    if host.vgpus.is_vendor_function(device):
        return _of_vendor(host, device.driver, link)
    if not device.is_on_vfio:
        return _unbound(host, device, link)
    named = _by_name(device, driver, link)
    known = host.guest_support and host.guest_support.migration_of(name)
    if not known:
        return named
    shown = _as_shown(known, driver, link)
    if shown.is_possible or named.is_possible:
        return shown
    return replace(named, evidence=(*named.evidence, shown.evidence[-1]))


def vgpu_migratability(host: HostSnapshot, vgpu: Vgpu) -> Migratability:
    """Whether an active vGPU can migrate."""
    driver = vgpu.driver or "unknown driver"
    link = f"{vgpu}: type {vgpu.type}, driver {driver}"
    known = host.guest_support and host.guest_support.migration_of(vgpu.name)
    if known:
        return _as_shown(known, driver, link)
    return _of_vendor(host, "i915" if "GVTg" in vgpu.type else vgpu.driver, link)


def _as_shown(known: MigrationState, driver: str, link: str) -> Migratability:
    place = f"/sys/kernel/debug/vfio/{known.name}"
    if known.state is None:
        shown = (link, f"{place}: no directory migration")
        return Migratability(is_possible=False, why=f"{driver} does not migrate it", evidence=shown)
    shown = (link, f"{place}/migration/state: {known.state}")
    return Migratability(
        is_possible=True,
        why=f"{driver} migrates it",
        features=known.features,
        state=known.state,
        evidence=shown,
    )


def _by_name(device: PciDevice, driver: str, link: str) -> Migratability:
    condition = CONDITIONS.get(driver.replace("-", "_"))
    if condition is None:
        return Migratability(
            is_possible=False, why=f"{driver} does not migrate devices", evidence=(link,)
        )
    if device.physical_function is None:
        return Migratability(
            is_possible=False,
            why=f"{driver} migrates virtual functions only",
            remedy=_virtual_function_instead(device),
            evidence=(link, f"/sys/bus/pci/devices/{device.address}: no physfn link"),
        )
    return Migratability(
        is_possible=True, why=f"{driver} migrates it", condition=condition, evidence=(link,)
    )


def _virtual_function_instead(device: PciDevice) -> str:
    """How to assign a virtual function of it, which its host driver creates; empty without any."""
    if not device.sriov_totalvfs:
        return ""
    if device.sriov_numvfs:
        return "assign one of its virtual functions"
    created = f"vfiomgr sriov set {device.address} 1"
    returned = f"vfiomgr unbind {device.address}, then " if device.is_on_vfio else ""
    return f"create a virtual function and assign it: {returned}{created}"


def _unbound(host: HostSnapshot, device: PciDevice, link: str) -> Migratability:
    """A function on a host driver: what its best VFIO driver can do."""
    variant = best_variant(host.variants, device.modalias)
    if variant is None and not host.knows_variants:
        lists = f"modules.dep and modules.alias in /lib/modules/{host.kernel.release}"
        remedy = (
            "create them as root: depmod" if host.kernel.boot_id else "add them to the recording"
        )
        if host.kernel.release is None:
            lists, remedy = "/proc/sys/kernel/osrelease", "add it to the recording"
        return Migratability(
            is_possible=None,
            why=f"cannot find variant drivers of VFIO without {lists}",
            remedy=remedy,
            evidence=(link,),
        )
    if variant is None:
        why = "only a variant driver of VFIO migrates devices, and this kernel has none for it"
        return Migratability(is_possible=False, why=why, evidence=(link,))
    found = _by_name(device, variant.driver_name, link)
    if not found.is_possible:
        return found
    remedy = f"vfiomgr bind {device.address} --driver {variant.driver_name}"
    return replace(found, remedy=remedy, evidence=(link, variant.alias))


def _of_vendor(host: HostSnapshot, driver: str | None, link: str) -> Migratability:
    if driver == "i915":
        why = "GVT-g does not migrate vGPUs (drivers/gpu/drm/i915/gvt/kvmgt.c)"
        return Migratability(is_possible=False, why=why, evidence=(link,))
    if driver is None or "nvidia" not in driver:
        why = f"{driver or 'its driver'} is not known to migrate devices, or not to"
        return Migratability(is_possible=None, why=why, evidence=(link,))
    kernel = host.kernel.version
    if kernel is not None and kernel < _FIRST_KERNEL:
        why = f"Linux {host.kernel.release} is too old for NVIDIA's migration of vGPUs"
        return Migratability(is_possible=False, why=why, evidence=(link,))
    return Migratability(
        is_possible=True,
        why="NVIDIA's vGPU driver migrates it",
        condition="the other host needs a compatible release of NVIDIA's driver",
        evidence=(link,),
    )
