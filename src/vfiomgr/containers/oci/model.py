"""What a container gets through its OCI configuration, and what was added to one.

The fields are those of the runtime specification, config-linux.md, "Devices" and "Allowed Device
list".
"""

from __future__ import annotations

from typing import Literal

from vfiomgr.host.accounts import NodeAccess
from vfiomgr.value import Value

NodeForm = Literal["group", "cdev"]
"""How a device is opened: `/dev/vfio/N`, or `/dev/vfio/devices/vfioN` (Linux 6.6)."""
ContainerRuntime = Literal["runc", "kata"]
"""The runtime of the container: one on this kernel, or Kata in a guest."""
RULE_ACCESS = "rwm"
"""Read, write, mknod."""


class DeviceNode(Value):
    """A character device of the host."""

    path: str
    major: int
    minor: int
    access: NodeAccess

    @property
    def number(self) -> tuple[int, int]:
        """The device number of the kernel."""
        return self.major, self.minor

    def __str__(self) -> str:
        """`/dev/vfio/23 (240:0)`."""
        return f"{self.path} ({self.major}:{self.minor})"


class ContainerDevice(Value):
    """A host device for a container: the paths of its nodes, and the addresses that share them."""

    name: str
    """The address of its first function, or the UUID of the vGPU."""
    functions: tuple[str, ...]
    nodes: tuple[str, ...]


class Injection(Value):
    """A device with the numbers of its nodes, and its CDI names."""

    device: ContainerDevice
    nodes: tuple[DeviceNode, ...]
    cdi: tuple[str, ...] = ()
