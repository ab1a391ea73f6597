"""Paths of kernel files, as a type of their own."""

from __future__ import annotations

import shlex


class HostPath(str):
    """An absolute path on the described host; meaningless without the HostTree it is read in."""

    __slots__ = ()

    def __truediv__(self, name: str) -> HostPath:
        """Append a name (or a constant relative path).

        Raises:
            ValueError: the name would leave the directory.
        """
        if name[:1] == "/" or "\0" in name or (".." in name and ".." in name.split("/")):
            message = f"{name!r} is not a name below {self}"
            raise ValueError(message)
        return HostPath(self + "/" + name)  # the quickest way, and scans make thousands

    @property
    def name(self) -> str:
        """The last component."""
        return self.rsplit("/", 1)[-1]

    @property
    def parent(self) -> HostPath:
        """All but the last component."""
        return HostPath(self.rsplit("/", 1)[0])


MACHINE = "/"
"""The root of the machine that vfiomgr runs on; only the command line supplies it."""
PCI_DEVICES = HostPath("/sys/bus/pci/devices")
PCI_DRIVERS = HostPath("/sys/bus/pci/drivers")
PCI_SLOTS = HostPath("/sys/bus/pci/slots")
PCI_DRIVERS_PROBE = HostPath("/sys/bus/pci/drivers_probe")
PCI_RESCAN = HostPath("/sys/bus/pci/rescan")
BOOT_ID = HostPath("/proc/sys/kernel/random/boot_id")
HOSTNAME = HostPath("/proc/sys/kernel/hostname")
MACHINE_ID = HostPath("/etc/machine-id")
ACPI_TABLES = HostPath("/sys/firmware/acpi/tables")
MODULE_DIRECTORIES = (HostPath("/usr/lib/modules"), HostPath("/lib/modules"))
"""Directories with the modules of each kernel, by its release."""
IOMMU_GROUPS = HostPath("/sys/kernel/iommu_groups")
IOMMU_UNITS = HostPath("/sys/class/iommu")
MDEV_PARENTS = HostPath("/sys/class/mdev_bus")
MDEV_DEVICES = HostPath("/sys/bus/mdev/devices")
VFIO_NODES = HostPath("/dev/vfio")
VFIO_CDEVS = HostPath("/dev/vfio/devices")
IOMMU_NODE = HostPath("/dev/iommu")
STATE = HostPath("/var/lib/vfiomgr")
RUNTIME = HostPath("/run/vfiomgr")
SRIOV_MANAGE = HostPath("/usr/lib/nvidia/sriov-manage")


def vfio_group_node(group: int, *, noiommu: bool = False) -> HostPath:
    """The device node of an IOMMU group, which gives access to its devices."""
    return VFIO_NODES / (f"noiommu-{group}" if noiommu else str(group))


SCRIPT = HostPath("/etc/libvirt/hooks/qemu.d/50-vfiomgr")


def echo(text: str, target: str) -> str:
    """The shell command that writes a text to a kernel file."""
    is_plain = bool(text) and shlex.join(text.split(" ")) == text
    return f"echo {text if is_plain else shlex.quote(text)} > {shlex.quote(target)}"
