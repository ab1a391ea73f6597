"""Names of vGPU definitions, and the restore of autostart vGPUs."""

from __future__ import annotations

import uuid as uuids
from typing import TYPE_CHECKING

from vfiomgr.definitions import restore_apply
from vfiomgr.definitions.plan import canonical, find_type, types_of
from vfiomgr.definitions.requests import RestoreVgpus
from vfiomgr.vgpu.named import uuid_of

if TYPE_CHECKING:
    from vfiomgr.definitions.restore_apply import Restored
    from vfiomgr.library import Host
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.snapshot.source import HostSource
    from vfiomgr.vgpu.model import VgpuParent, VgpuType


def restore(host: Host, parent: str | None = None, *, boot: bool = False) -> tuple[Restored, ...]:
    """Start all autostart vGPUs (of `parent`); a failure does not stop the others.

    With `boot`, vGPUs that mdevctl starts at boot are left to it.

    Raises:
        NeedsRoot: changing the host requires root; nothing was changed.

    """
    with host.changing() as work:
        return restore_apply.restore(RestoreVgpus(parent, boot=boot), work)


def name_to_define(host: HostSource, parent: str | None, uuid: str | None) -> str:
    """The given UUID, the address of a virtual function, or a random UUID.

    Raises:
        UsageError: `uuid` is invalid.

    """
    if uuid is not None:
        return uuid_of(uuid)
    place = canonical(parent or "")
    parents = host.scan_devices().vgpu_parents
    if any(known.name == place and known.family == "vendor-vfio" for known in parents):
        return place
    return str(uuids.uuid4())


def type_of(host: HostSnapshot, parent: VgpuParent, wanted: str, where: str) -> VgpuType:
    """Find a type by name on a parent or on others of its GPU; `where` names it in errors.

    Raises:
        UnknownDevice: the type is not found.

    """
    return find_type(types_of(host, parent), wanted, where)
