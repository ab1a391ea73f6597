"""How much memory QEMU will lock for VFIO (qemuDomainGetMemLockLimitBytes of libvirt)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vfiomgr.errors import Refusal
from vfiomgr.libvirt.build.model import Reason
from vfiomgr.libvirt.model.features import LOCKS_PER_DEVICE
from vfiomgr.units import GIB, size
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.libvirt.build.model import DomainRequest
    from vfiomgr.version import Version

RESERVE = GIB
"""What libvirt adds for the BARs that are mapped, and for QEMU itself."""


def needed_lock(memory_bytes: int, devices: int, *, has_viommu: bool, own_mappings: int = 0) -> int:
    """Bytes that QEMU locks for `devices` of VFIO and for NVMe disks and vDPA (`own_mappings`).

    Devices share one mapping of the guest's memory, but have one each behind a virtual IOMMU; NVMe
    disks and vDPA interfaces always have one each.
    """
    times = (devices if has_viommu else min(devices, 1)) + own_mappings
    return memory_bytes * times + RESERVE if times else 0


class Lock(Value):
    """What QEMU will lock, and the limit to write; None where libvirt sets one by itself."""

    needed_bytes: int
    limit_bytes: int | None
    reasons: tuple[Reason, ...] = ()


def plan_lock(wish: DomainRequest, devices: int, libvirt: Version) -> Lock:
    """What will be locked, and the limit where libvirt's own is none.

    Raises:
        Refusal: the limit that is asked for is below it.

    """
    needed = needed_lock(wish.memory_bytes, devices, has_viommu=wish.viommu is not None)
    if not needed:
        return Lock(0, wish.hard_limit_bytes)
    times = f"{devices} x " if wish.viommu is not None else ""
    told = f"{times}{size(wish.memory_bytes)} of memory and {size(RESERVE)}: {size(needed)}"
    limit = wish.hard_limit_bytes
    if limit is not None and limit < needed:
        message = f"with a hard limit of {size(limit)} QEMU could not lock what VFIO needs: {told}"
        raise Refusal(message, f"ask for --hard-limit {-(-needed // GIB)}G, or leave it to libvirt")
    if limit is not None or wish.is_locked:
        return Lock(needed, limit, (Reason("memtune", f"VFIO needs {told}"),))
    if wish.viommu is not None and devices > 1 and not LOCKS_PER_DEVICE.is_in(libvirt):
        told += f"; libvirt {libvirt} would allow for one device"
        return Lock(needed, needed, (Reason("memtune", f"VFIO needs {told}"),))
    told = f"QEMU will lock {told}; libvirt sets the limit"
    return Lock(needed, None, (Reason("memory", told),))
