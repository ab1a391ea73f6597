"""Places pods on nodes one after the other, each on the node with the fewest free devices.

Of nodes that it fits on, those come first that have the best alternatives of its requests.

Nodes with the same devices and labels share a template. Nodes with the same template and the same
used devices share a state, and what was found for a pod in a state holds for all of them.
Kubernetes' own choice among nodes that fit has no such order: it scores CPU and memory, and chooses
at random among equals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from vfiomgr.node.dra.model import Pool
from vfiomgr.node.simulation.allocator import (
    Allocation,
    SearchTooLong,
    SelectorFailed,
    Stock,
    candidates_of,
    counters_of,
    why_not,
)
from vfiomgr.node.simulation.model import (
    ChosenUnit,
    DeviceKey,
    NodeUse,
    PendingReason,
    PodResult,
    SimulationResult,
)

if TYPE_CHECKING:
    from vfiomgr.node.model import Inventory, NodeUnit
    from vfiomgr.node.simulation.model import ChosenDevice, PodClaim, Workload
    from vfiomgr.node.simulation.selectors import Selectors

_UNITS = "units"
"""The pool of units that the DRA driver does not publish; pools of a node begin with /."""
HOSTNAME = "kubernetes.io/hostname"
_LABELS = {"kubernetes.io/os": "linux"}


Publisher = Callable[[frozenset[DeviceKey]], tuple[Pool, ...]]
"""The pools of a node while some of its devices are allocated."""


class NodeTemplate(Struct, frozen=True, eq=False):
    """What nodes with the same devices and labels have."""

    stock: Callable[[frozenset[DeviceKey]], Stock]
    """What is left while some devices are allocated: a GPU may change its types of vGPUs."""
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

    def stock(used: frozenset[DeviceKey]) -> Stock:
        allocated = frozenset((f"{node}{pool}", name) for pool, name in used if pool != _UNITS)
        pools = publish(allocated)
        own = [replace(pool, name=pool.name.removeprefix(node)) for pool in pools]
        return Stock.of(candidates_of(own), counters_of(own), used)

    candidates = stock(frozenset()).candidates
    keys = {candidate.unit: candidate.key for candidate in candidates if candidate.unit}
    return NodeTemplate(
        stock,
        {
            resource.name: tuple(_key(keys, unit) for unit in resource.units if unit.is_healthy)
            for resource in found.resources
        },
        frozenset(_key(keys, unit) for unit in found.units if unit.used_by or unit.is_open),
        {**_LABELS, **labels},
    )


def _key(keys: Mapping[str, DeviceKey], unit: NodeUnit) -> DeviceKey:
    return keys.get(unit.id, (_UNITS, unit.id))


_NAMED = 3
"""How many nodes a reason names."""


class _State(Struct, frozen=True, eq=False):
    """A template of which some devices are used."""

    number: int
    template: int
    stock: Stock
    used: frozenset[DeviceKey]
    free: int
    """Devices that can still be allocated at once."""


class _Fit(Struct, frozen=True, eq=False):
    """What a pod gets in a state, and the state after that."""

    devices: tuple[ChosenDevice, ...]
    units: tuple[ChosenUnit, ...]
    used: frozenset[DeviceKey]
    rank: int
    """How many better alternatives of its requests it does not have."""


class _Failure(Struct, frozen=True):
    """Why a pod does not fit in a state; with `is_final`, it is not placed on any node."""

    text: str
    is_final: bool = False


class Scheduler:
    """Places pods; each allocation changes the state of a node."""

    def __init__(self, cluster: Cluster, selectors: Selectors) -> None:
        self._cluster = cluster
        self._selectors = selectors
        self._states: dict[tuple[int, frozenset[DeviceKey]], _State] = {}
        self._members: dict[_State, list[int]] = {}
        """The nodes in each state, as heaps; those that have left it are removed late."""
        self._sizes: Counter[_State] = Counter()
        self._shapes: dict[tuple[object, ...], int] = {}
        self._found: dict[tuple[int, int], _Fit | _Failure] = {}
        self._pending: dict[tuple[object, ...], tuple[int, tuple[PendingReason, ...]]] = {}
        """The reasons of pods, with the number of pods that were placed before."""
        self._claims: dict[str, int] = {}
        """The node of each shared claim that is allocated."""
        self._now: dict[int, _State] = {}
        """The state of each node."""
        self._on_node: Counter[int] = Counter()
        """The number of pods on each node."""
        self._index = {each.name: node for node, each in enumerate(cluster.nodes)}
        for node, each in enumerate(cluster.nodes):
            self._enter(node, each.template, cluster.templates[each.template].used)

    def place(self, workloads: Iterable[Workload]) -> SimulationResult:
        """Place all pods in order."""
        pods = [
            self._place(workload, workload.pod(number))
            for workload in workloads
            for number in range(1, workload.replicas + 1)
        ]
        return SimulationResult(tuple(pods), tuple(self._uses()), tuple(self._cluster.unknown))

    def _place(self, workload: Workload, pod: str) -> PodResult:
        claims = tuple(each for each in workload.claims if each.shared not in self._claims)
        shape = self._shapes.setdefault((workload.limits, claims), len(self._shapes))
        nodes = self._allowed(workload)
        question = (shape, workload.node_selector, nodes)
        placed, reasons = self._pending.get(question, (-1, ()))
        if placed == self._on_node.total():
            return PodResult(pod, workload.kind, reasons=reasons)
        fits: list[tuple[int, int, int, _Fit]] = []
        count = 0
        for state, node, size in self._choices(workload, nodes):
            found = self._outcome(shape, workload.limits, claims, state)
            if isinstance(found, _Fit):
                fits.append((found.rank, state.free, node, found))
                count += size
            elif found.is_final:
                fits = []
                break
        if not fits:
            reasons = tuple(self._reasons(workload, nodes, shape))
            self._pending[question] = (self._on_node.total(), reasons)
            return PodResult(pod, workload.kind, reasons=reasons)
        *_, node, fit = min(fits, key=lambda each: each[:3])
        self._move(node, fit, claims)
        name = self._cluster.nodes[node].name
        devices = tuple(replace(each, pool=f"{name}{each.pool}") for each in fit.devices)
        return PodResult(pod, workload.kind, name, devices, fit.units, count)

    def _allowed(self, workload: Workload) -> frozenset[int] | None:
        """The nodes that its host name and its shared claims leave; None for all."""
        sets = [
            frozenset({self._claims[each.shared]})
            for each in workload.claims
            if each.shared in self._claims
        ]
        names = [value for key, value in workload.node_selector if key == HOSTNAME]
        sets += [frozenset({self._index[n]} if n in self._index else ()) for n in names]
        return frozenset.intersection(*sets) if sets else None

    def _choices(
        self, workload: Workload, nodes: frozenset[int] | None
    ) -> Iterator[tuple[_State, int, int]]:
        """The nodes that a pod may run on: a state, the first node in it, and how many are."""
        if nodes is None:
            for state, members in self._members.items():
                if self._has_labels(state.template, workload):
                    while self._now[members[0]] is not state:
                        heappop(members)
                    yield state, members[0], self._sizes[state]
            return
        for node in sorted(nodes):
            if self._has_labels(self._now[node].template, workload):
                yield self._now[node], node, 1

    def _has_labels(self, template: int, workload: Workload) -> bool:
        labels = self._cluster.templates[template].labels
        wanted = ((k, v) for k, v in workload.node_selector if k != HOSTNAME)
        return all(labels.get(key) == value for key, value in wanted)

    def _outcome(
        self,
        shape: int,
        limits: tuple[tuple[str, int], ...],
        claims: tuple[PodClaim, ...],
        state: _State,
    ) -> _Fit | _Failure:
        """What a pod gets in a state, which is found once."""
        key = (shape, state.number)
        found = self._found.get(key)
        if found is None:
            template = self._cluster.templates[state.template]
            found = self._found[key] = _allocated(state, template, limits, claims, self._selectors)
        return found

    def _move(self, node: int, fit: _Fit, claims: tuple[PodClaim, ...]) -> None:
        state = self._now[node]
        self._sizes[state] -= 1
        if not self._sizes[state]:
            del self._members[state]
        self._on_node[node] += 1
        self._claims.update({each.shared: node for each in claims if each.shared})
        self._enter(node, state.template, fit.used)

    def _enter(self, node: int, template: int, used: frozenset[DeviceKey]) -> None:
        key = (template, used)
        state = self._states.get(key)
        if state is None:
            number = len(self._states)
            state = _state(number, template, self._cluster.templates[template], used)
            self._states[key] = state
        self._now[node] = state
        heappush(self._members.setdefault(state, []), node)
        self._sizes[state] += 1

    def _reasons(
        self, workload: Workload, nodes: frozenset[int] | None, shape: int
    ) -> Iterator[PendingReason]:
        found: dict[str, list[str]] = {}
        final: dict[str, list[str]] = {}
        for node, each in enumerate(self._cluster.nodes):
            failure = self._failure(workload, nodes, shape, node)
            (final if failure.is_final else found).setdefault(failure.text, []).append(each.name)
        ordered = sorted((final or found).items(), key=lambda item: -len(item[1]))
        for text, names in ordered:
            yield PendingReason(text, len(names), tuple(names[:_NAMED]))

    def _failure(
        self, workload: Workload, nodes: frozenset[int] | None, shape: int, node: int
    ) -> _Failure:
        if not self._has_labels(self._now[node].template, workload):
            return _Failure("the labels do not match the node selector")
        if nodes is not None and node not in nodes:
            is_named = any(key == HOSTNAME for key, _ in workload.node_selector)
            what = "the host name does not match the node selector"
            return _Failure(what if is_named else "a claim of the pod is allocated on another node")
        found = self._found.get((shape, self._now[node].number))
        return found if isinstance(found, _Failure) else _Failure("")

    def _uses(self) -> Iterator[NodeUse]:
        for node, each in enumerate(self._cluster.nodes):
            state = self._now[node]
            before = len(self._cluster.templates[each.template].used)
            used = len(state.used) - before
            yield NodeUse(each.name, self._on_node[node], used, before, state.free)


def _state(number: int, place: int, template: NodeTemplate, used: frozenset[DeviceKey]) -> _State:
    stock = template.stock(used)
    free = stock.free_at_once()
    for keys in template.resources.values():
        free.update(key for key in keys if key not in stock.by_key and key not in used)
    return _State(number, place, stock, used, len(free))


def _allocated(
    state: _State,
    template: NodeTemplate,
    limits: tuple[tuple[str, int], ...],
    claims: tuple[PodClaim, ...],
    selectors: Selectors,
) -> _Fit | _Failure:
    """What a pod gets in a state: first the devices of its claims, then those of its limits."""
    stock = state.stock.copy()
    search = Allocation(stock, claims, selectors)
    try:
        devices = search.find()
        if devices is None:
            return _Failure(why_not(state.stock, claims, selectors))
    except SelectorFailed as error:
        return _Failure(f"{error} (Kubernetes then places the pod on no node)", is_final=True)
    except SearchTooLong as error:
        return _Failure(str(error))
    units: list[ChosenUnit] = []
    for resource, count in limits:
        keys = template.resources.get(resource)
        if keys is None:
            return _Failure(f"the node does not offer {resource}")
        free = [key for key in keys if _is_free(stock, key)]
        if len(free) < count:
            return _Failure(f"{resource}: {count} needed, {len(free)} of {len(keys)} free")
        for key in free[:count]:
            stock.take(key)
            units.append(ChosenUnit(resource, _unit(stock, key)))
    return _Fit(devices, tuple(units), frozenset(stock.used), _rank(claims, devices))


def _rank(claims: tuple[PodClaim, ...], devices: Iterable[ChosenDevice]) -> int:
    """How many better alternatives there are; the scheduler prefers nodes with fewer.

    Source: computeScore in pkg/scheduler/framework/plugins/dynamicresources of Kubernetes.
    """
    chosen = {(each.claim, each.request) for each in devices}
    return sum(
        place
        for claim in claims
        for request in claim.spec.requests
        for place, alternative in enumerate(request)
        if (claim.name, alternative.name) in chosen
    )


def _is_free(stock: Stock, key: DeviceKey) -> bool:
    """Whether a unit of the device plugin is free; for the DRA driver, it is the same device."""
    candidate = stock.by_key.get(key)
    return key not in stock.used if candidate is None else stock.is_free(candidate)


def _unit(stock: Stock, key: DeviceKey) -> str:
    candidate = stock.by_key.get(key)
    return key[1] if candidate is None else candidate.unit
