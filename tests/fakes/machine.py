"""What every host's /sys, /dev and /proc hold before any device is there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.fakes.sysfs import READ_ONLY, WRITE_ONLY
from vfiomgr.paths import IOMMU_GROUPS, PCI_DEVICES, PCI_DRIVERS, PCI_DRIVERS_PROBE

if TYPE_CHECKING:
    from tests.fakes.sysfs import Sysfs

RELEASE = "6.12.0-fake"
_ROUTE_HEADER = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT"


def lay_out_machine(sysfs: Sysfs, *, boot: int, has_iommu: bool) -> None:
    """Make the files of a host that has just booted for the `boot`-th time."""
    for directory in (PCI_DEVICES, PCI_DRIVERS, IOMMU_GROUPS, "/sys/class/iommu", "/proc/net"):
        sysfs.make(directory)
    sysfs.put(PCI_DRIVERS_PROBE, "", WRITE_ONLY)
    sysfs.put("/sys/bus/pci/rescan", "", WRITE_ONLY)
    sysfs.put("/proc/sys/kernel/osrelease", RELEASE, READ_ONLY)
    sysfs.put("/proc/sys/kernel/random/boot_id", f"00000000-0000-4000-8000-{boot:012d}", READ_ONLY)
    sysfs.put("/proc/cmdline", "ro quiet" + " intel_iommu=on" * has_iommu, READ_ONLY)
    sysfs.put(
        "/proc/cpuinfo", "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu vmx", READ_ONLY
    )
    sysfs.make("/proc/1/fd")
    sysfs.put("/proc/1/comm", "systemd", READ_ONLY)
    sysfs.put("/proc/mounts", "proc /proc proc rw 0 0", READ_ONLY)
    sysfs.put("/proc/net/route", _ROUTE_HEADER, READ_ONLY)
    if has_iommu:
        sysfs.make("/sys/devices/virtual/iommu/dmar0")
        sysfs.link("/sys/class/iommu/dmar0", "/sys/devices/virtual/iommu/dmar0")
        sysfs.put_bytes("/sys/firmware/acpi/tables/DMAR", b"DMAR", 0o400)
