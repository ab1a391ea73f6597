"""The topology of a host as a tree of values."""

from __future__ import annotations

from typing import Literal

from vfiomgr.pci.links import PciLink
from vfiomgr.pci.model import PciAddress
from vfiomgr.value import Value

NodeKind = Literal[
    "host",
    "numa-node",
    "root-complex",
    "root-port",
    "upstream-port",
    "downstream-port",
    "bridge",
    "function",
    "virtual-function",
    "vgpu-parent",
    "vgpu",
]
"""`vgpu-parent` is a parent of vGPUs that is no PCI function."""
PORTS: tuple[NodeKind, ...] = ("root-port", "upstream-port", "downstream-port", "bridge")
LEADING_DOWN: tuple[NodeKind, ...] = ("root-port", "downstream-port")
"""Ports whose link is the one to what is below them."""
ProblemKind = Literal[
    "iommu-off",
    "unidentified",
    "stuck",
    "not-responding",
    "no-iommu-group",
    "group-not-viable",
    "no-driver",
    "link-width",
    "link-speed",
    "boot-display",
    "wedged",
]
Severity = Literal["error", "warning", "info"]


class Problem(Value):
    """What keeps a function from a guest, or makes it slower than it can be."""

    kind: ProblemKind
    severity: Severity
    text: str


class TopologyNode(Value):
    """One thing of the picture, with all that is below it."""

    kind: NodeKind
    id: str
    """What sets it apart: an address, a UUID, `numa 0`, `pci0000:00`."""
    name: str | None = None
    short_name: str | None = None
    """Vendor and marketing name of a function."""
    address: PciAddress | None = None
    class_name: str | None = None
    driver: str | None = None
    iommu_group: int | None = None
    numa_node: int | None = None
    link: PciLink | None = None
    port_link: PciLink | None = None
    """Of a function behind a port: the same link as the port reports it."""
    users: tuple[str, ...] | None = None
    """What uses it, on the host or for a guest; None where nobody looked."""
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    is_chipset: bool = False
    """Whether it is part of the chipset or the processor, which no guest gets."""
    is_selected: bool = False
    """Whether its branch was asked for; it is never folded then."""
    children: tuple[TopologyNode, ...] = ()


class Topology(Value):
    """The picture of a host."""

    root: TopologyNode
    is_iommu_on: bool | None
    """None where a recording does not show it."""
    knows_users: bool
    """Whether somebody looked for processes that use devices; only root sees all of them."""
    knows_links: bool
