"""The facts of a host at one moment, and values that only such a moment has."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from msgspec import field

from vfiomgr.containers.cdi.model import CdiFile
from vfiomgr.definitions.model import DefinitionFacts
from vfiomgr.host.kernel import KernelFacts
from vfiomgr.pci.accelerators import CxlDevice
from vfiomgr.pci.capabilities import MsixVectors, PciLink, ResetCapabilities, Translation
from vfiomgr.pci.drivers import OriginalState, VfioVariant
from vfiomgr.pci.iommu import IommuGroup, IommuState, VfioState
from vfiomgr.pci.memory import HostTopology
from vfiomgr.pci.model import PciAddress, PciDevice
from vfiomgr.persistence.model import FileFacts
from vfiomgr.users.facet import UserFacts
from vfiomgr.value import Value
from vfiomgr.vgpu.model import Vgpu, VgpuFacts

if TYPE_CHECKING:  # slow to import, and few hosts are read with them: deferred_types
    from vfiomgr.check.model import Readiness  # noqa: TC004
    from vfiomgr.pci.guest_support import GuestSupport  # noqa: TC004
    from vfiomgr.snapshot.health import DeviceHealth  # noqa: TC004
    from vfiomgr.users.desktop import DesktopFacts  # noqa: TC004
    from vfiomgr.users.released import ReleasedCard  # noqa: TC004

DeviceState = Literal["host", "vfio", "in-use", "vgpu", "no-driver"]
"""What a function is used for: by a driver of the host, by VFIO without a guest, by a guest that
has it open, as the carrier of active vGPUs, or by no driver."""


Holder = PciDevice | Vgpu
"""What a guest or a process can have: a function, or a vGPU."""


class HostFacts(Value, dict=True):
    """The facts of a host at one moment; devices, groups and vGPUs sorted by number."""

    deferred_types: ClassVar[dict[str, str]] = {
        "Readiness": "vfiomgr.check.model",
        "GuestSupport": "vfiomgr.pci.guest_support",
        "DesktopFacts": "vfiomgr.users.desktop",
        "DeviceHealth": "vfiomgr.snapshot.health",
        "ReleasedCard": "vfiomgr.users.released",
    }
    """Types of its fields that its module does not import, with their modules."""

    facets: ClassVar[dict[str, type[Value]]] = {
        "kernel": KernelFacts,
        "vgpus": VgpuFacts,
        "users": UserFacts,
        "files": FileFacts,
    }
    """The fields whose facts are members of the snapshot itself in documents."""

    kernel: KernelFacts
    vgpus: VgpuFacts
    iommu: IommuState
    pci_drivers: tuple[str, ...]
    devices: tuple[PciDevice, ...]
    groups: tuple[IommuGroup, ...]
    origins: tuple[OriginalState, ...] = ()
    users: UserFacts = UserFacts()
    files: FileFacts = FileFacts()
    vfio: VfioState = field(default_factory=VfioState)
    variants: tuple[VfioVariant, ...] = ()
    """Variant drivers of VFIO of this kernel; read together with the users."""
    readiness: Readiness | None = None
    """The facts for `vfiomgr check`; None if not requested."""
    reset_capabilities: tuple[ResetCapabilities, ...] | None = None
    """The reset capabilities in configuration spaces; None if not read (requires root)."""
    bus_resets: tuple[PciAddress, ...] | None = None
    """The bridges that can reset their secondary bus; None if not read."""
    msix: tuple[MsixVectors, ...] = ()
    """Virtual functions whose number of MSI-X vectors can be set."""
    vfio_modules: tuple[str, ...] | None = None
    """Modules of this kernel with `vfio` in their names; read together with the users.

    None without the module lists.
    """
    pci_unlisted: str | None = None
    """The reason why its PCI functions cannot be listed; None if they can."""
    pci_unidentified: tuple[str, ...] = ()
    """Addresses of functions that are omitted because they cannot be identified."""
    definitions: DefinitionFacts | None = None
    """Definitions of vGPUs; None if not read."""
    topology: HostTopology | None = None
    """NUMA nodes and CPUs; None if not read."""
    cdi_files: tuple[CdiFile, ...] = ()
    """All CDI specifications, of any origin."""
    cxl: tuple[CxlDevice, ...] | None = None
    """CXL devices, by their configuration spaces; None if not read (requires root)."""
    links: tuple[PciLink, ...] | None = None
    """Links of PCI Express; None if not read."""
    health: DeviceHealth | None = None
    """Numbers of PCIe errors, and earlier readings; None if not read."""
    guest_support: GuestSupport | None = None
    """Versions and abilities for guests; None if not read."""
    translations: tuple[Translation, ...] | None = None
    """ATS and PASID of functions that have them; None if not read (requires root)."""
    released: tuple[ReleasedCard, ...] = ()
    """Cards that the desktop released for a guest; read together with the users."""
    released_unread: tuple[str, ...] = ()
    """The addresses of cards whose record of a release cannot be read."""
    desktop: DesktopFacts | None = None
    """The console, the sessions and the programs of the desktop; None if not read."""
