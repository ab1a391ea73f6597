"""The facts of a host at one moment, and values that only such a moment has."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from msgspec import field

from vfiomgr.containers.cdi.model import CdiFile
from vfiomgr.definitions.model import DefinitionFacts
from vfiomgr.documents.text import TextFile
from vfiomgr.host.kernel import KernelFacts
from vfiomgr.host.owners import NodeAccess
from vfiomgr.pci.accelerators import CxlDevice
from vfiomgr.pci.capabilities import MsixVectors, PciLink, ResetCapabilities
from vfiomgr.pci.drivers import OriginalState, VfioVariant
from vfiomgr.pci.iommu import IommuGroup, IommuState, VfioState
from vfiomgr.pci.memory import HostTopology
from vfiomgr.pci.model import PciAddress, PciDevice
from vfiomgr.pci.translation import Translation
from vfiomgr.persistence.initramfs.model import Initramfs
from vfiomgr.snapshot.node_agent import NodeStatus
from vfiomgr.snapshot.unknown import UnknownUsers
from vfiomgr.value import Value
from vfiomgr.vgpu.model import GpuMode, GpuPartition, Vgpu, VgpuParent, WedgedFunction
from vfiomgr.vgpu.quota.model import GpuQuotas

if TYPE_CHECKING:  # slow to import, and few hosts are read with them: deferred_types
    from vfiomgr.check.model import Readiness  # noqa: TC004
    from vfiomgr.pci.guest_support import GuestSupport  # noqa: TC004

DeviceState = Literal["host", "vfio", "in-use", "vgpu", "no-driver"]
"""What a function is used for: by a driver of the host, by VFIO without a guest, by a guest that
has it open, as the carrier of active vGPUs, or by no driver."""


Holder = PciDevice | Vgpu
"""What a guest or a process can have: a function, or a vGPU."""


class DeviceUser(Value):
    """A process that has a device node open."""

    node: str
    pid: int
    command: str
    unit: str | None = None
    """Its systemd unit: `gdm.service`, `machine-qemu-3-win.scope`."""
    functions: tuple[PciAddress, ...] = ()
    """The PCI functions below the node, if it belongs to several: block devices."""
    guest: str | None = None
    """The name of QEMU's guest (-name): the domain of libvirt, the sandbox of Kata."""
    pod: str | None = None
    """The pod of such a sandbox, `namespace/name`, where its runtime keeps it."""

    def __str__(self) -> str:
        """`guest win (qemu-system-x86, PID 4711, machine-qemu-3-win.scope)`, or `bash (PID 7)`."""
        place = f"PID {self.pid}{f', {self.unit}' if self.unit else ''}"
        if self.pod:
            return f"pod {self.pod} ({self.command}, {place})"
        if self.guest:
            return f"guest {self.guest} ({self.command}, {place})"
        return f"{self.command} ({place})"


class HostUse(Value):
    """A use of the function by the host itself, which would break without it."""

    address: PciAddress
    kind: Literal["mounted-disk", "default-route", "network", "persistence-mode"]
    what: str
    lift: str = ""
    """The command that ends this use; empty if unknown."""


class NodeFact(Value):
    """A node of VFIO, with its owner and mode."""

    path: str
    access: NodeAccess


class HostFacts(Value, dict=True):
    """The facts of a host at one moment; devices, groups and vGPUs sorted by number."""

    deferred_types: ClassVar[dict[str, str]] = {
        "Readiness": "vfiomgr.check.model",
        "GuestSupport": "vfiomgr.pci.guest_support",
    }
    """Types of its fields that its module does not import, with their modules."""

    facets: ClassVar[dict[str, type[Value]]] = {"kernel": KernelFacts}
    """The fields whose facts are members of the snapshot itself in documents."""

    kernel: KernelFacts
    iommu: IommuState
    pci_drivers: tuple[str, ...]
    devices: tuple[PciDevice, ...]
    groups: tuple[IommuGroup, ...]
    vgpu_parents: tuple[VgpuParent, ...]
    vgpus: tuple[Vgpu, ...]
    origins: tuple[OriginalState, ...] = ()
    host_uses: tuple[HostUse, ...] | None = ()
    """None if the tree has no /proc, as in recordings."""
    users: tuple[DeviceUser, ...] | None = None
    """Open device nodes; None if not read (it requires root and a walk through /proc)."""
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
    files: tuple[TextFile, ...] = ()
    """The files of vfiomgr below /etc, and those of driverctl."""
    nodes: tuple[NodeFact, ...] = ()
    initramfs: Initramfs | None = None
    """None if no supported tool is installed."""
    has_systemd: bool = False
    gpu_modes: tuple[GpuMode, ...] = ()
    """How GPUs divide their memory, if nvidia-smi was asked."""
    vgpu_marks: tuple[TextFile, ...] = ()
    """The records of vGPUs that vfiomgr created in this boot."""
    made_functions: tuple[str, ...] = ()
    """Virtual functions whose type was set by vfiomgr and not changed since."""
    wedged: tuple[WedgedFunction, ...] = ()
    """Virtual functions that cannot become vGPUs until all those of the GPU are recreated."""
    has_sriov_manage: bool = False
    """Whether NVIDIA's program that creates virtual functions is installed."""
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
    gpu_partitions: tuple[GpuPartition, ...] = ()
    """The partitions of GPUs in MIG mode, if nvidia-smi was asked."""
    quotas: tuple[GpuQuotas, ...] = ()
    """Quotas of GPUs whose drivers share them among plain virtual functions."""
    topology: HostTopology | None = None
    """NUMA nodes and CPUs; None if not read."""
    cdi_files: tuple[CdiFile, ...] = ()
    """All CDI specifications, of any origin."""
    cxl: tuple[CxlDevice, ...] | None = None
    """CXL devices, by their configuration spaces; None if not read (requires root)."""
    links: tuple[PciLink, ...] | None = None
    """Links of PCI Express; None if not read."""
    guest_support: GuestSupport | None = None
    """Versions and abilities for guests; None if not read."""
    translations: tuple[Translation, ...] | None = None
    """ATS and PASID of functions that have them; None if not read (requires root)."""
    agent: NodeStatus | None = None
    """The offer of a Kubernetes node's agent; without an answer, the pods of the kubelet's
    record, with `pid` 0; None if not read, or if there is neither."""
    unknown_users: tuple[UnknownUsers, ...] = ()
    """Sources that could name users of devices and could not be read."""
