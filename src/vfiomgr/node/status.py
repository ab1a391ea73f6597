"""The state of an agent, as `vfiomgr node status` shows it."""

from __future__ import annotations

from vfiomgr.diagnostic import Diagnostic
from vfiomgr.value import Value


class DeviceStatus(Value):
    """A device that is offered to the kubelet."""

    id: str
    addresses: tuple[str, ...]
    numa_nodes: tuple[int, ...]
    is_healthy: bool
    used_by: str
    """A pod as NAMESPACE/NAME/CONTAINER, a guest or a process."""
    reasons: tuple[Diagnostic, ...] = ()
    """Why it is not healthy."""


class ResourceStatus(Value):
    """A resource, and whether the kubelet lists its devices."""

    name: str
    consumer: str
    is_registered: bool
    devices: tuple[DeviceStatus, ...] = ()


class NodeStatus(Value):
    """The state of an agent."""

    pid: int
    plugin_directory: str
    has_kubelet: bool
    """Whether a kubelet accepts registrations."""
    resources: tuple[ResourceStatus, ...] = ()
    notes: tuple[Diagnostic, ...] = ()
    """Devices that are not offered, and why."""
    error: str = ""
    """Why the last scan failed."""
