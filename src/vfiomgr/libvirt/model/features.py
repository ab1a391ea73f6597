"""What a libvirt and a QEMU can read: who writes XML for them asks here first.

The releases are those of https://libvirt.org/news.html.
"""

from __future__ import annotations

from vfiomgr.errors import Refusal
from vfiomgr.value import Value
from vfiomgr.version import Version


class Feature(Value):
    """Something that can be written since a release of libvirt."""

    what: str
    """As a message names it: `<maxphysaddr>`."""
    since: Version

    def is_in(self, libvirt: Version) -> bool:
        """Whether that libvirt reads it."""
        return libvirt >= self.since

    def require(self, libvirt: Version, why: str) -> None:
        """Make sure that it can be written.

        Raises:
            Refusal: that libvirt is too old; `why` says what it is needed for.

        """
        if not self.is_in(libvirt):
            message = (
                f"{why} needs {self.what}, which libvirt has since {self.since}: this is {libvirt}"
            )
            raise Refusal(message, f"install libvirt {self.since} or later, or leave it out")


UNASSIGNED_ADDRESS = Feature("<address type='unassigned'>", Version(6, 0))
ROOT_PORT_WITHOUT_HOTPLUG = Feature("<target hotplug='off'/> of a root port", Version(6, 3))
FIRMWARE_FEATURES = Feature("<feature> of <firmware>", Version(7, 2))
MDEV_DEFINITION = Feature("nodedev-define of mediated devices", Version(7, 3))
MDEV_AUTOSTART = Feature("nodedev-autostart of mediated devices", Version(7, 8))
QEMU_OVERRIDE = Feature("<qemu:override>", Version(8, 2))
VIRTIO_IOMMU = Feature("<iommu model='virtio'>", Version(8, 3))
MAXPHYSADDR = Feature("<maxphysaddr>", Version(8, 7))
LOCKS_PER_DEVICE = Feature("a limit of locked memory for each device", Version(8, 7))
MAXPHYSADDR_LIMIT = Feature("the limit of <maxphysaddr>", Version(9, 3))
VENDOR_FUNCTION = Feature("a virtual function that stays on its vendor's driver", Version(9, 7))
DRIVER_MODEL = Feature("<driver model>", Version(10, 0))
PCI_DISPLAY = Feature("display and ramfb of PCI devices", Version(10, 3))
ADDS_EIM = Feature("extended interrupt mode by itself, for many CPUs", Version(10, 10))
AMD_IOMMU = Feature("<iommu model='amd'>", Version(11, 5))
ACPI_NODESET = Feature("<acpi nodeset>", Version(11, 8))
IOMMUFD = Feature("<driver iommufd>", Version(12, 1))
DOMAIN_IOMMUFD = Feature("<iommufd> of a domain", Version(12, 2))

QEMU_IOMMUFD = Version(9, 0)
"""The QEMU whose vfio-pci has the property iommufd (IOMMUFDProperties in qapi/qom.json)."""


def lacks_iommufd(qemu: Version | None) -> bool:
    """Whether that QEMU is known to have no iommufd; of one that nobody knows, it is not."""
    return qemu is not None and qemu < QEMU_IOMMUFD
