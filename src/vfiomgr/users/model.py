"""Who uses devices: processes and the host itself, and sources of it that cannot be read."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Literal

from vfiomgr.expressions import expression
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value


class UnknownUsers(Value):
    """A source that could name users of devices, and could not be read."""

    kind: Literal[
        "pods", "processes", "open-files", "disks", "network", "input", "persistence-mode"
    ]
    """The users: `pods` with devices for guests, `processes` that may have mapped nodes of host
    drivers, `open-files` that may be any node, uses of `disks` or of the `network`, keyboards and
    mice (`input`), or NVIDIA's persistence mode."""
    why: str
    """`cannot ask the node agent on /run/vfiomgr/node.sock: timed out`."""
    lift: str
    """The remedy: how to make it readable."""
    functions: tuple[PciAddress, ...] = ()
    """The functions concerned, in addition to all that guests can open (pods), that have nodes
    (processes), that are network adapters (network) or USB controllers (input)."""


Report = Callable[[UnknownUsers], None]
"""Receives each unreadable source."""


def warn(unknown: UnknownUsers) -> None:
    """Report it as a warning, for lists, where no decision depends on it."""
    warnings.warn(unknown.why, stacklevel=3)


Monitor = Literal["services", "gpu-operator"]
"""Programs that only watch all GPUs of a host: `services` of it, and pods of NVIDIA's operator."""
_SERVICE = expression(r"(nvidia-)?dcgm(-exporter)?\.service|nvsm(-[a-z0-9-]+)?\.service")
"""NVIDIA's DCGM and its exporter (packages datacenter-gpu-manager, dcgm-exporter), and NVSM of DGX
systems. Not nvidia-persistenced: its end would turn off the mode of the other GPUs too."""
_OPERAND = expression(r"[^/]+/nvidia-(dcgm|dcgm-exporter)(-dra)?-[a-z0-9]{5}")
"""Pods of the operator's DaemonSets (assets/state-dcgm and state-dcgm-exporter in gpu-operator)."""


def is_monitoring_service(unit: str) -> bool:
    """Whether a systemd unit only watches GPUs."""
    return _SERVICE.fullmatch(unit) is not None


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
    """The pod of the process, `namespace/name`, or its UID if no file of the host names it."""

    @property
    def monitor(self) -> Monitor | None:
        """What it is, if it only watches GPUs."""
        if self.pod:
            return "gpu-operator" if _OPERAND.fullmatch(self.pod) else None
        return "services" if self.unit and is_monitoring_service(self.unit) else None

    def __str__(self) -> str:
        """`guest win (qemu-system-x86, PID 4711, machine-qemu-3-win.scope)`, or `bash (PID 7)`."""
        if self.pod:  # its unit is the container's, a long number
            return f"pod {self.pod} ({self.command}, PID {self.pid})"
        place = f"PID {self.pid}{f', {self.unit}' if self.unit else ''}"
        if self.guest:
            return f"guest {self.guest} ({self.command}, {place})"
        return f"{self.command} ({place})"


class HostUse(Value):
    """A use of the function by the host itself, which would break without it."""

    address: PciAddress
    kind: Literal[
        "mounted-disk",
        "default-route",
        "network",
        "persistence-mode",
        "keyboard",
        "mouse",
        "watchdog",
        "tpm",
        "console",
    ]
    what: str
    lift: str = ""
    """The command that ends this use; empty if unknown."""
