"""Names of what no two runs may change at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vfiomgr.model.pci import PciDevice


def device_lock(device: PciDevice) -> str:
    """Its IOMMU group's; its own where it is in none."""
    if device.iommu_group is None:
        return f"device-{device.address}"
    return f"group-{device.iommu_group}"
