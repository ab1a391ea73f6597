"""systemd units for a node whose agent runs without a container."""

from __future__ import annotations

from vfiomgr.paths import HostPath
from vfiomgr.persistence.installed_layout import BOOT, SETTLE
from vfiomgr.persistence.model import SANDBOX, UNITS, require_plain

AGENT = UNITS / "vfiomgr-node.service"
CDI = UNITS / "vfiomgr-node-cdi.service"
PLUGINS = HostPath("/var/lib/kubelet/device-plugins")
"""The kubelet's directory of device plugins, whatever its --root-dir is."""
FEATURES = HostPath("/etc/kubernetes/node-feature-discovery/features.d")
"""Node Feature Discovery reads labels here."""

_AFTER = f"local-fs.target {BOOT.name} vfiomgr-persist.service vfiomgr-vgpu.service"
_KUBELETS = (
    "kubelet.service k3s.service k3s-agent.service rke2-server.service rke2-agent.service "
    "k0scontroller.service k0sworker.service snap.microk8s.daemon-kubelite.service"
)
_SERVING = f"""\
CapabilityBoundingSet=
CapabilityBoundingSet=CAP_SYS_PTRACE CAP_DAC_READ_SEARCH
ReadWritePaths=-{PLUGINS} -{FEATURES}
ProtectKernelModules=yes
DevicePolicy=closed
RestrictNamespaces=yes
SystemCallFilter=~@module
"""
"""Changes to the sandbox of services that change the host: this one only reads it.

The two capabilities are for the users of a device, in /proc. /sys stays writable, because resources
can ask for resets."""
_INSTALL = """
[Install]
WantedBy=multi-user.target
"""


def render_agent(program: str) -> str:
    """Render the unit of the agent.

    The kubelet's directory is created before the sandbox, which could not include it later.

    Raises:
        Refusal: the path would need quoting.

    """
    return f"""\
[Unit]
Description=Offer VFIO devices and vGPUs to the kubelet
After={_AFTER} {CDI.name}

[Service]
Type=notify
ExecStartPre=+mkdir -p -m 0750 {PLUGINS}
ExecStart={require_plain(program)} node run --metrics unix:/run/vfiomgr/metrics.sock
ExecReload=kill -HUP $MAINPID
Restart=on-failure
RestartSec=5
SuccessExitStatus=130
TimeoutStopSec=10
WatchdogSec=60
{SANDBOX}{_SERVING}{_INSTALL}"""


def render_cdi(program: str) -> str:
    """Render the unit that writes the CDI specifications at boot, before the kubelet starts.

    Pods of before the reboot then get their devices by name, although the numbers of the IOMMU
    groups have changed.

    Raises:
        Refusal: the path would need quoting.

    """
    return f"""\
[Unit]
Description=Write the CDI specifications of devices for pods
After={_AFTER}
Before={_KUBELETS}

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStartPre=-udevadm settle --timeout={SETTLE}
ExecStart={require_plain(program)} node run --once
TimeoutStartSec=120
{SANDBOX}{_SERVING}{_INSTALL}"""


RENDERERS = {AGENT.name: render_agent, CDI.name: render_cdi}
