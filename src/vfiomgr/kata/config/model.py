"""A configuration of Kata that is to be written: what was asked for, and what comes of it."""

from __future__ import annotations

from typing import Literal

from vfiomgr.kata.model import KataHypervisor, KataRelease
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciDevice
from vfiomgr.value import Value

Plug = Literal["cold", "hot"]
"""Before the guest starts, or when a container comes that has the device."""
KeyValue = str | int | bool | tuple[str, ...]
POD_RESOURCES = HostPath("/var/lib/kubelet/pod-resources/kubelet.sock")
DROP_IN = "50-vfiomgr.toml"


class KataRequest(Value):
    """What a configuration is to be for; None leaves it to the planner."""

    release: KataRelease
    functions: tuple[PciDevice, ...]
    """Those that one guest gets, whole slots."""
    hypervisor: KataHypervisor = "qemu"
    plug: Plug | None = None
    memory_mib: int | None = None
    firmware: str | None = None
    has_pod_resources: bool | None = None
    annotations: tuple[str, ...] = ()
    """Names of annotations that pods may use; of the hypervisor's."""
    kernel_params: tuple[str, ...] = ()
    """Arguments for the guest's kernel, beside those that the configuration has."""


class KataSetup(Value):
    """What of the host bears upon it."""

    pod_resources: HostPath = POD_RESOURCES
    """The kubelet's socket."""
    firmware: HostPath | None = None
    """Kata's own OVMF, where it is there."""


class KeyEntry(Value):
    """One key that is written."""

    table: tuple[str, ...]
    """`("hypervisor", "qemu")`."""
    key: str
    value: KeyValue
    comment: str = ""

    @property
    def section(self) -> str:
        """As in the table of keys."""
        return self.table[0]


class KataPlan(Value):
    """The keys of a configuration, in order, and what is to be said about them."""

    release: KataRelease
    hypervisor: str
    """As its table is called."""
    plug: Plug | None
    """None where the runtime has no key for it, and plugs in what containers are given."""
    entries: tuple[KeyEntry, ...]
    notes: tuple[str, ...]
    functions: tuple[PciDevice, ...]

    def value(self, key: str) -> KeyValue | None:
        """What is written for a key; None where it is not."""
        return next((entry.value for entry in self.entries if entry.key == key), None)
