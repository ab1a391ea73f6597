"""What a node offers to the kubelet: resources, their devices, and why one is not healthy."""

from __future__ import annotations

from collections.abc import Container, Iterator
from itertools import chain
from typing import Literal, get_args

from msgspec import field
from msgspec.structs import replace

from vfiomgr.containers.resource_names import DEFAULT_PREFIX
from vfiomgr.diagnostic import Diagnostic, Override
from vfiomgr.host.owners import ROOT_ONLY, NodeAccess
from vfiomgr.paths import HostPath
from vfiomgr.pci.model import PciAddress
from vfiomgr.users.model import Monitor
from vfiomgr.value import Value

FEATURES = HostPath("/etc/kubernetes/node-feature-discovery/features.d")
"""Node Feature Discovery reads labels here."""
Consumer = Literal["default", "kata", "kubevirt", "container"]
"""Who receives a device; `default` serves Kata and plain containers."""
CONSUMERS: tuple[Consumer, ...] = get_args(Consumer)
UnitKind = Literal["function", "mdev", "vendor", "quota"]
"""A function on a VFIO driver, or a vGPU by its family (vgpu.md)."""
SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where a pod has the token of its service account, and the API server's authority."""


class OnDemand(Value):
    """How claims bind devices of the host, and return them: a rule of the node's layout."""

    driver: str | None = None
    """The VFIO driver; None for the best match."""
    is_sticky: bool = False
    """Whether the devices stay on it after a claim."""
    allow: tuple[Override, ...] = ()
    """Safety checks that the layout overrides."""
    stop: tuple[Monitor, ...] = ()
    """What is stopped while a device is bound, and started again afterwards."""


class NodeUnit(Value):
    """What one container can receive: an IOMMU group with all its functions, or a vGPU."""

    id: str
    """The kubelet's device ID: a PCI address, or the UUID of a mediated device."""
    kind: UnitKind
    addresses: tuple[PciAddress, ...]
    """The functions of the group on VFIO drivers, the named one first; of an mdev, its parent."""
    group: int | None
    nodes: tuple[str, ...]
    """The device nodes on the host that a container opens, without /dev/vfio/vfio."""
    numa_nodes: tuple[int, ...] = ()
    """Empty where the firmware does not report one."""
    pcie_path: tuple[str, ...] = ()
    """The root port and the switches above it, the root first."""
    parent: PciAddress | None = None
    """The physical function of a vGPU."""
    pci_ids: tuple[str, ...] = ()
    """`10de:2235` of each of the addresses, to recognise a device that was exchanged."""
    driver: str = ""
    """The driver of the named function."""
    type: str = ""
    """The type of a vGPU, `NVIDIA A40-4Q`; empty for others."""
    reasons: tuple[Diagnostic, ...] = ()
    """Why it is not healthy; empty if it is."""
    hints: tuple[str, ...] = ()
    """What is worse than it should be, although it works, e.g. `narrow-link`."""
    used_by: str = ""
    """A pod as NAMESPACE/NAME, a domain or a process, for people."""
    pod: str = ""
    """The pod that the kubelet gave it to, NAMESPACE/NAME."""
    claim: str = ""
    """The ResourceClaim that has it, NAMESPACE/NAME."""
    is_open: bool = False
    """Whether a process has one of its nodes open."""
    access: NodeAccess = ROOT_ONLY
    """The owner and mode of its nodes in a container."""
    on_demand: OnDemand | None = None
    """How claims bind it, for a device that is on its host driver without a claim."""
    aliases: tuple[str, ...] = ()
    """What other device plugins and DRA drivers call it while it is on its host driver."""

    @property
    def is_healthy(self) -> bool:
        """Whether the kubelet may give it to a pod."""
        return not self.reasons


class NodeResource(Value):
    """An extended resource of the node."""

    name: str
    """DOMAIN/NAME, at most 63 characters."""
    units: tuple[NodeUnit, ...]
    consumer: Consumer = "default"
    resets: bool = False
    """Whether each container's devices are reset before it starts."""


class Inventory(Value):
    """All resources of a node at one moment."""

    resources: tuple[NodeResource, ...] = ()
    notes: tuple[Diagnostic, ...] = ()
    """Devices that are not offered, and why."""
    on_demand: tuple[NodeUnit, ...] = ()
    """Those that only claims get, which bind them."""

    def resource(self, name: str) -> NodeResource | None:
        """The resource of this name."""
        return next((each for each in self.resources if each.name == name), None)

    @property
    def units(self) -> Iterator[NodeUnit]:
        """The units of all resources, and those that claims bind."""
        return chain(*(resource.units for resource in self.resources), self.on_demand)

    def without(self, ids: Container[str]) -> Inventory:
        """The inventory without some units."""
        if all(unit.id not in ids for unit in self.units):
            return self
        bound = tuple(unit for unit in self.on_demand if unit.id not in ids)
        kept = (
            replace(each, units=tuple(unit for unit in each.units if unit.id not in ids))
            for each in self.resources
        )
        resources = tuple(each for each in kept if each.units)
        return replace(self, resources=resources, on_demand=bound)


class ResourceRule(Value):
    """The resource of some devices, from a rule of a layout; values that are None are defaults."""

    devices: frozenset[str]
    """Addresses of functions, and names of parents of vGPUs."""
    name: str | None = None
    consumer: Consumer | None = None
    resets: bool | None = None


class NodeSettings(Value):
    """How the devices of a node become resources."""

    prefix: str = DEFAULT_PREFIX
    consumer: Consumer = "default"
    aliases: dict[str, str] = field(default_factory=dict)
    """Resource names by PCI ID (`10de:2235`), vGPU type (`A40-4Q`) or default name."""
    resets: bool = False
    rules: tuple[ResourceRule, ...] | None = None
    """If given, only the devices of these rules are offered."""
    on_demand: dict[str, OnDemand] = field(default_factory=dict)
    """The devices that claims bind, by their addresses."""


class Answer(Value):
    """What the kubelet passes to the container runtime for the units of one container."""

    cdi_devices: tuple[str, ...] = ()
    """Qualified names of CDI devices."""
    environment: dict[str, str] = field(default_factory=dict)
    nodes: tuple[str, ...] = ()
    """Device nodes, at the same path in the container, permissions `rw`."""
    annotations: dict[str, str] = field(default_factory=dict)
