"""The VFIO backend of new hostdevs: iommufd where kernel, libvirt and QEMU have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from vfiomgr.guests.iommufd import NO_BACKEND, backend_for, is_supported_by_kernel
from vfiomgr.libvirt.model import IOMMUFD
from vfiomgr.paths import IOMMU_NODE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vfiomgr.guests.iommufd import VfioBackend
    from vfiomgr.guests.model import GuestDevice
    from vfiomgr.libvirt.versions import Versions
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource


def choose(
    host: HostSource, seen: HostSnapshot, units: Sequence[GuestDevice], versions: Versions
) -> VfioBackend:
    """Choose the backend of the devices; programs are asked only if the kernel has iommufd."""
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
