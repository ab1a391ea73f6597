"""How the agent of a node runs."""

from __future__ import annotations

from vfiomgr.node.messages import Settings
from vfiomgr.paths import RUNTIME, HostPath
from vfiomgr.value import Value

PLUGIN_DIRECTORY = HostPath("/var/lib/kubelet/device-plugins")
"""A constant of the kubelet, whatever its --root-dir is (DevicePluginPath in constants.go)."""
POD_RESOURCES = HostPath("/var/lib/kubelet/pod-resources/kubelet.sock")
CONTROL = RUNTIME / "node.sock"
"""Where `node status` and `node release` reach the agent."""


class AgentSettings(Value):
    """The places and intervals of an agent."""

    root: str
    """The root of the host."""
    plugin_directory: str
    """Of the kubelet, on this machine."""
    pod_resources: str
    """The socket of the kubelet's pod resources."""
    control: str
    """The agent's own socket."""
    metrics: str | None = None
    """HOST:PORT or unix:PATH."""
    scan: Settings = Settings()
    debounce: float = 10.0
    """Seconds until a device that becomes unhealthy is reported."""
    pods_interval: float = 30.0
    """Seconds between questions which pods have devices; the kubelet limits their rate."""
    tick: float = 1.0
    """Seconds between looks at the kubelet's socket."""
