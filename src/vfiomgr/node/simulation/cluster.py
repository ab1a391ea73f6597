"""The nodes of a simulation; nodes with the same devices and labels share what is known of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from vfiomgr.node.dra.model import Pool
from vfiomgr.node.simulation.allocator import Candidate, candidates_of, counters_of
from vfiomgr.node.simulation.model import DeviceKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vfiomgr.node.model import Inventory, NodeUnit
    from vfiomgr.node.simulation.allocator import CounterKey

_UNITS = "units"
"""The pool of units that the DRA driver does not publish; pools of a node begin with /."""
HOSTNAME = "kubernetes.io/hostname"
_LABELS = {"kubernetes.io/os": "linux"}


class Offer(Struct, frozen=True, eq=False):
    """What the DRA driver of a node publishes; the pools are named without the node."""

    candidates: tuple[Candidate, ...]
    counters: dict[CounterKey, int]


Publisher = Callable[[frozenset[DeviceKey]], tuple[Pool, ...]]
"""The pools of a node while some of its devices are allocated."""


class NodeTemplate(Struct, frozen=True, eq=False):
    """What nodes with the same devices and labels have."""

    offer: Callable[[frozenset[DeviceKey]], Offer]
    """What is published while some devices are allocated: a GPU may change its types of vGPUs."""
    resources: dict[str, tuple[DeviceKey, ...]]
    """The healthy units of the device plugin by resource, with the device that each one is."""
    used: frozenset[DeviceKey]
    """Devices that are in use on the snapshot."""
    labels: dict[str, str]


class SimulatedNode(Struct, frozen=True):
    """A node and its template."""

    name: str
    template: int


class Cluster(Struct):
    """Nodes in order, and their templates."""

    nodes: list[SimulatedNode] = field(default_factory=list)
    templates: list[NodeTemplate] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Facts that decide which devices nodes offer, and that their snapshots lack."""

    def add(self, template: NodeTemplate, names: Iterable[str]) -> None:
        """Add nodes with this template."""
        self.templates.append(template)
        number = len(self.templates) - 1
        self.nodes += [SimulatedNode(name, number) for name in names]


def template_of(
    publish: Publisher, found: Inventory, node: str, labels: Mapping[str, str]
) -> NodeTemplate:
    """The template of a node, from what its agent would publish and offer."""

    def offer(used: frozenset[DeviceKey]) -> Offer:
        allocated = frozenset((f"{node}{pool}", name) for pool, name in used if pool != _UNITS)
        pools = publish(allocated)
        own = [replace(pool, name=pool.name.removeprefix(node)) for pool in pools]
        return Offer(candidates_of(own), counters_of(own))

    candidates = offer(frozenset()).candidates
    keys = {candidate.unit: candidate.key for candidate in candidates if candidate.unit}
    return NodeTemplate(
        offer,
        {
            resource.name: tuple(_key(keys, unit) for unit in resource.units if unit.is_healthy)
            for resource in found.resources
        },
        frozenset(_key(keys, unit) for unit in found.units if unit.used_by or unit.is_open),
        {**_LABELS, **labels},
    )


def _key(keys: Mapping[str, DeviceKey], unit: NodeUnit) -> DeviceKey:
    return keys.get(unit.id, (_UNITS, unit.id))
