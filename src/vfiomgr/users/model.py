"""Who uses devices: processes, and the host itself."""

from __future__ import annotations

from typing import Literal

from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value


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
