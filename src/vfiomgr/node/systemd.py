"""systemd on a node whose agent runs without a container: units, and notifications."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING

from vfiomgr.expressions import expression
from vfiomgr.node.model import FEATURES
from vfiomgr.paths import HostPath
from vfiomgr.persistence.installed_layout import BOOT, SETTLE
from vfiomgr.persistence.model import SANDBOX, UNITS, require_plain

if TYPE_CHECKING:
    from collections.abc import Iterable

_PLAIN = expression(r"[A-Za-z0-9._+/:=-]+")
"""Words without a special meaning in units."""
AGENT = UNITS / "vfiomgr-node.service"
CDI = UNITS / "vfiomgr-node-cdi.service"
PLUGINS = HostPath("/var/lib/kubelet/device-plugins")
"""The kubelet's directory of device plugins, whatever its --root-dir is."""

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
ENVIRONMENT = HostPath("/etc/vfiomgr/node-agent.env")
"""KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT and NODE_NAME, for an agent with claims."""
CREDENTIALS = HostPath("/etc/vfiomgr/node-agent")
"""Its token and ca.crt."""
_CLAIMS = """\
EnvironmentFile={environment}
ExecStartPre=+mkdir -p -m 0750 {directories}
ReadWritePaths=-{plugins} -{features} {directories}
IPAddressDeny=
RestrictAddressFamilies=AF_INET AF_INET6

[Unit]
Wants=network-online.target
After=network-online.target
"""
"""Changes to that sandbox for an agent with claims: it creates vGPUs as other services do, asks the
API server, and serves the kubelet in two more directories."""
_INSTALL = """
[Install]
WantedBy=multi-user.target
"""


def render_agent(
    program: str, arguments: Iterable[str] = (), claims: HostPath | None = None
) -> str:
    """Render the unit of the agent, with more arguments for it.

    With `claims`, the kubelet's --root-dir, it also serves ResourceClaims.

    It starts before the kubelet, which soon after its own start rejects the pods of before a reboot
    if their devices are not listed. The kubelet's directories are created before the sandbox, which
    could not include them later.

    Raises:
        Refusal: the path would need quoting.

    """
    options = "--metrics unix:/run/vfiomgr/metrics.sock"
    if claims is not None:
        options += f" --dra --credentials {CREDENTIALS} --kubelet-root {_quoted(claims)}"
    rights = _SERVING if claims is None else _rights_for_claims(claims)
    return f"""\
[Unit]
Description=Offer VFIO devices and vGPUs to the kubelet
After={_AFTER} {CDI.name}
Before={_KUBELETS}

[Service]
Type=notify
TimeoutStartSec=90
ExecStartPre=+mkdir -p -m 0750 {PLUGINS}
ExecStart={_command(program, options, arguments)}
ExecReload=kill -HUP $MAINPID
Restart=on-failure
RestartSec=5
SuccessExitStatus=130
TimeoutStopSec=10
WatchdogSec=60
{SANDBOX}{rights}{_INSTALL}"""


def _rights_for_claims(kubelet: HostPath) -> str:
    directories = " ".join(_quoted(kubelet / name) for name in ("plugins", "plugins_registry"))
    return _CLAIMS.format(
        environment=ENVIRONMENT, directories=directories, plugins=PLUGINS, features=FEATURES
    )


def render_cdi(program: str, arguments: Iterable[str] = ()) -> str:
    """Render the unit that writes the CDI specifications at boot, before the kubelet starts.

    The arguments name the resources, which are those of the agent only if it has the same ones.

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
ExecStart={_command(program, "--once", arguments)}
TimeoutStartSec=120
{SANDBOX}{_SERVING}{_INSTALL}"""


def _command(program: str, options: str, arguments: Iterable[str]) -> str:
    return " ".join((require_plain(program), "node run", options, *map(_quoted, arguments)))


def _quoted(word: str) -> str:
    """A word in ExecStart= (systemd.syntax(7), systemd.service(5))."""
    if _PLAIN.fullmatch(word):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + escaped.replace("%", "%%").replace("$", "$$") + '"'


RENDERERS = {AGENT.name: render_agent, CDI.name: render_cdi}


_SOCKET = "NOTIFY_SOCKET"
_WATCHDOG = "WATCHDOG_USEC"
_WATCHED = "WATCHDOG_PID"


def notify(state: str) -> None:
    """Send a state such as `READY=1`; no effect if systemd does not wait for one.

    It is dropped if systemd does not read: the agent must not wait for it.
    """
    name = os.environ.get(_SOCKET, "")
    if not name.startswith(("/", "@")):
        return
    address = f"\0{name[1:]}" if name.startswith("@") else name
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)  # noqa: FBT003 - sockets have it so
        sender.sendto(state.encode(), address)


def watchdog_seconds() -> float | None:
    """How often systemd expects `WATCHDOG=1`; None if it does not watch this process."""
    text = os.environ.get(_WATCHDOG, "")
    if not text.isdecimal() or os.environ.get(_WATCHED, str(os.getpid())) != str(os.getpid()):
        return None
    return int(text) / 1_000_000 or None
