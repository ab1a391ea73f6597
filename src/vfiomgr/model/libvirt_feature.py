"""What a libvirt and a QEMU can read: who writes XML for them asks here first.

The releases are those of https://libvirt.org/news.html.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from vfiomgr.errors import Refusal, UsageError

_NUMBERS = re.compile(r"\s*v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?\b")
_MILLION, _THOUSAND = 1_000_000, 1_000


@dataclass(frozen=True, order=True, slots=True)
class Version:
    """Of a program: compared number by number."""

    major: int
    minor: int
    micro: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `9.0`, `v9.0.0` or `9.0.0-4+deb12u2`.

        Raises:
            UsageError: it does not begin so.

        """
        match = _NUMBERS.match(text)
        if match is None:
            message = f"{text!r} is not a version"
            raise UsageError(message, "write it as 9.0.0; virsh version shows it")
        return cls(*(int(part or 0) for part in match.groups()))

    @classmethod
    def from_number(cls, number: int) -> Self:
        """From major * 1,000,000 + minor * 1,000 + micro, as virConnectGetLibVersion gives it."""
        return cls(number // _MILLION, number // _THOUSAND % _THOUSAND, number % _THOUSAND)

    def __str__(self) -> str:
        """`9.0.0`."""
        return f"{self.major}.{self.minor}.{self.micro}"


@dataclass(frozen=True, slots=True)
class Feature:
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
MDEV_CREATION = Feature("creation of mediated devices by nodedev", Version(6, 5))
MDEV_DEFINITION = Feature("definition of mediated devices by nodedev", Version(7, 3))
MDEV_AUTOSTART = Feature("autostart of mediated devices by nodedev", Version(7, 8))
QEMU_OVERRIDE = Feature("<qemu:override>", Version(8, 2))
VIRTIO_IOMMU = Feature("<iommu model='virtio'>", Version(8, 3))
MAXPHYSADDR = Feature("<maxphysaddr>", Version(8, 7))
LOCKS_PER_DEVICE = Feature("a limit of locked memory for each device", Version(8, 7))
MAXPHYSADDR_LIMIT = Feature("the limit of <maxphysaddr>", Version(9, 3))
VENDOR_FUNCTION = Feature("a virtual function that stays on its vendor's driver", Version(9, 7))
DRIVER_MODEL = Feature("<driver model>", Version(10, 0))
PCI_DISPLAY = Feature("display and ramfb of PCI devices", Version(10, 3))
AMD_IOMMU = Feature("<iommu model='amd'>", Version(11, 5))
ACPI_NODESET = Feature("<acpi nodeset>", Version(11, 8))
IOMMUFD = Feature("<driver iommufd>", Version(12, 1))
DOMAIN_IOMMUFD = Feature("<iommufd> of a domain", Version(12, 2))

QEMU_IOMMUFD = Version(9, 0)
"""The QEMU whose vfio-pci has the property iommufd (IOMMUFDProperties in qapi/qom.json)."""
