"""libvirt as a backend: domains for releases of libvirt and QEMU, and their VFIO backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.guests.iommufd import NO_BACKEND, VfioBackend, backend_for, is_supported_by_kernel
from vfiomgr.libvirt.build.plan import plan_domain
from vfiomgr.libvirt.releases import IOMMUFD
from vfiomgr.libvirt.xml import render
from vfiomgr.paths import IOMMU_NODE
from vfiomgr.units import Version
from vfiomgr.value import Value

if TYPE_CHECKING:
    from vfiomgr.guests.model import GuestDevice
    from vfiomgr.libvirt.build.model import DomainPlan, DomainRequest
    from vfiomgr.libvirt.versions import Versions
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


class LibvirtBackend(Value):
    """libvirt of a release, with a QEMU whose release may be unknown."""

    libvirt: Version
    qemu: Version | None = None
    with_reasons: bool = False
    """Whether the XML has the reason for each part as a comment."""

    def plan(self, host: HostSnapshot, request: DomainRequest) -> DomainPlan:
        """Plan a complete domain, as `plan_domain`."""
        return plan_domain(host, request, self.libvirt, self.qemu)

    def render(self, plan: DomainPlan) -> str:
        """The XML of the domain."""
        return render.domain(plan, with_reasons=self.with_reasons)


def choose_vfio_backend(
    host: HostSource, seen: HostSnapshot, units: Sequence[GuestDevice], versions: Versions
) -> VfioBackend:
    """Choose iommufd where kernel, libvirt and QEMU have it; programs are asked only then."""
    if not is_supported_by_kernel(host, seen, units):
        return NO_BACKEND
    release = versions.known_libvirt
    if release is None or not IOMMUFD.is_in(release):
        return NO_BACKEND
    support = f"{IOMMU_NODE}, libvirt {release} and"
    backend = backend_for(units, versions.known_qemu, support)
    if backend.has_iommufd and versions.is_elsewhere and host.snapshot is None:
        why = f"using iommufd: the kernel of the other host needs {IOMMU_NODE}, which this host has"
        return replace(backend, why=f"{why} (--no-iommufd for VFIO groups)")
    return backend
