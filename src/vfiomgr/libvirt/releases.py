"""The features of libvirt releases that devices and their options need.

The releases are from https://libvirt.org/news.html.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vfiomgr.diagnostic import refuse
from vfiomgr.guests.options import qemu_properties
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.guests.model import GuestDevice


class Feature(Value):
    """A feature that libvirt supports since a release."""

    what: str
    """Its name in messages: `<maxphysaddr>`."""
    since: Version

    def is_in(self, libvirt: Version) -> bool:
        """Whether that libvirt supports it."""
        return libvirt >= self.since

    def require(self, libvirt: Version, why: str, otherwise: str = "omit it") -> None:
        """Make sure that libvirt supports the feature; `otherwise` is the other remedy.

        Raises:
            Refusal: libvirt is too old; `why` says what needs the feature.
        """
        if not self.is_in(libvirt):
            message = f"{why} needs {self.what} (libvirt {self.since} or later); this is {libvirt}"
            remedy = f"install libvirt {self.since} or later, or {otherwise}"
            refuse("libvirt-too-old", self.what, message, remedy)


UNASSIGNED_ADDRESS = Feature("<address type='unassigned'>", Version(6, 0))
ROOT_PORT_WITHOUT_HOTPLUG = Feature("<target hotplug='off'/> of a root port", Version(6, 3))
GRAB_TOGGLE = Feature("grabToggle of <input type='evdev'>", Version(7, 6))
TEAMING = Feature("<teaming> of <hostdev>", Version(7, 1))
FIRMWARE_FEATURES = Feature("<feature> of <firmware>", Version(7, 2))
ACPI_INDEX = Feature("<acpi index>", Version(7, 3))
MDEV_DEFINITION = Feature("nodedev-define of mediated devices", Version(7, 3))
MDEV_AUTOSTART = Feature("nodedev-autostart of mediated devices", Version(7, 8))
JSON_DEVICES = Feature("QEMU's -device as JSON", Version(7, 9))
QEMU_OVERRIDE = Feature("<qemu:override>", Version(8, 2))
VIRTIO_IOMMU = Feature("<iommu model='virtio'>", Version(8, 3))
MAXPHYSADDR = Feature("<maxphysaddr>", Version(8, 7))
LOCKS_PER_DEVICE = Feature("a locked memory limit per device", Version(8, 7))
MAXPHYSADDR_LIMIT = Feature("the limit of <maxphysaddr>", Version(9, 3))
VENDOR_FUNCTION = Feature("a virtual function on its vendor driver", Version(9, 7))
PORT_MEMORY = Feature("<target memReserve/> of a root port", Version(10, 3))
PIPEWIRE = Feature("<audio type='pipewire'>", Version(9, 10))
INTERRUPTS_ONLY = Feature("dma_translation='off' of <iommu model='intel'>", Version(10, 7))
DRIVER_MODEL = Feature("<driver model>", Version(10, 0))
PCI_DISPLAY = Feature("display and ramfb of PCI devices", Version(10, 3))
ADDS_EIM = Feature("automatic extended interrupt mode, for many CPUs", Version(10, 10))
AMD_IOMMU = Feature("<iommu model='amd'>", Version(11, 5))
SMMU_BUS = Feature("pciBus of <iommu model='smmuv3'>", Version(11, 10))
ACPI_NODESET = Feature("<acpi nodeset>", Version(11, 8))
SMMU_ACCEL = Feature("accel='on' of <iommu model='smmuv3'>", Version(12, 7))
IOMMUFD = Feature("<driver iommufd>", Version(12, 1))
DOMAIN_IOMMUFD = Feature("<iommufd> of a domain", Version(12, 2))


def needed_features(unit: GuestDevice) -> Iterator[tuple[Feature, str]]:
    """What a device and its options need of libvirt, and how messages call it."""
    options = unit.options
    if unit.is_vendor_function:
        driver = unit.functions[0].driver or "the vendor driver"
        yield VENDOR_FUNCTION, f"{unit.functions[0]}, a vGPU on {driver},"
    if options.driver_model:
        yield DRIVER_MODEL, f"driver {options.driver_model} for {unit.name}"
    if unit.functions and (options.display or options.ramfb):
        yield PCI_DISPLAY, f"display of {unit.name}"
    if options.is_unassigned:
        yield UNASSIGNED_ADDRESS, f"{unit.name} (unassigned)"
    if options.partner is not None:
        yield TEAMING, f"teaming of {unit.name}"
    if options.acpi_nodes is not None:
        yield ACPI_NODESET, f"NUMA cells for {unit.name}"
    if options.acpi_index is not None:
        yield ACPI_INDEX, f"ACPI index of {unit.name}"
    if any(qemu_properties(options)):
        yield QEMU_OVERRIDE, f"a QEMU property for {unit.name}"
    if options.has_iommufd:
        where = "" if unit.has_groups else " on a kernel without VFIO groups"
        yield IOMMUFD, f"/dev/iommu for {unit.name}{where}"


MDEV_NEEDS_GROUPS = "libvirt passes mediated devices to QEMU only by VFIO groups"
"""libvirt 12.8: <driver> is only for PCI devices (hostdevsubsysmdev in domaincommon.rng), and
<iommufd> of a domain does not change the command line of a mediated device."""
