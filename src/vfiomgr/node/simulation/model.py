"""Pods, claims and nodes of a simulation, and its result, also as a document and rows for people.

Source of the names and rules: api/resource/v1/types.go of k8s.io/api.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from vfiomgr.units import counted
from vfiomgr.value import Value

MOST_RESULTS = 32
"""Devices of a claim (AllocationResultsMaxSize)."""

DeviceKey = tuple[str, str]
"""The pool and the name of a device; the pool is empty for units without a pool."""


class Toleration(Value):
    """Taints that a request accepts."""

    key: str = ""
    """Empty for all keys, with the operator Exists."""
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = ""
    effect: str = ""
    """Empty for all effects."""


class DeviceRequest(Value):
    """Devices of one class: a request, or an alternative of a prioritized list."""

    name: str
    """REQUEST, or REQUEST/ALTERNATIVE."""
    device_class: str
    selectors: tuple[str, ...] = ()
    """CEL expressions, those of the class first."""
    count: int | None = 1
    """None for all devices that match."""
    tolerations: tuple[Toleration, ...] = ()
    capacity: tuple[tuple[str, int], ...] = ()
    """The least capacity by name, rounded up."""
    admin: bool = False
    """Whether it is for administrators: devices that others have too."""


class Constraint(Value):
    """What the devices of some requests have in common, or not."""

    kind: Literal["matchAttribute", "distinctAttribute"]
    attribute: str
    """DOMAIN/NAME."""
    requests: tuple[str, ...] = ()
    """Names of requests or of alternatives; empty for all."""

    def concerns(self, request: str) -> bool:
        """Whether it is for a request, REQUEST or REQUEST/ALTERNATIVE."""
        names = (request, request.partition("/")[0])
        return not self.requests or any(name in self.requests for name in names)


class ClaimSpec(Value):
    """The content of a ResourceClaim."""

    requests: tuple[tuple[DeviceRequest, ...], ...]
    """The alternatives of each request; one unless it is a prioritized list."""
    constraints: tuple[Constraint, ...] = ()


class PodClaim(Value):
    """A claim of a pod."""

    name: str
    """Its name in the pod."""
    spec: ClaimSpec
    shared: str = ""
    """NAMESPACE/NAME of a ResourceClaim that other pods can use too; empty for a template."""


class Workload(Value):
    """Equal pods: a Pod, or the replicas of a Deployment."""

    kind: str
    namespace: str
    name: str
    replicas: int = 1
    node_selector: tuple[tuple[str, str], ...] = ()
    limits: tuple[tuple[str, int], ...] = ()
    """Resources of device plugins with their counts."""
    claims: tuple[PodClaim, ...] = ()

    def pod(self, number: int) -> str:
        """NAMESPACE/NAME of a pod; those of replicas are numbered from 1."""
        suffix = "" if self.kind == "Pod" else f"-{number}"
        return f"{self.namespace}/{self.name}{suffix}"


class ChosenDevice(Value):
    """A device that was chosen for a request of a claim."""

    claim: str
    """The name of the claim in the pod."""
    request: str
    """REQUEST, or REQUEST/ALTERNATIVE."""
    pool: str
    """The pool of the device: the node, or NODE/GPU."""
    device: str
    """The name of the device in its pool."""


class ChosenUnit(Value):
    """A unit that was chosen for a limit of a device plugin."""

    resource: str
    unit: str
    """A PCI address, or the UUID of a mediated device."""


class PendingReason(Value):
    """Why a pod does not fit, and on which nodes."""

    text: str
    """The first rule that a node does not satisfy."""
    count: int
    """The number of nodes."""
    nodes: tuple[str, ...]
    """The first of them."""


class PodResult(Value):
    """Where a pod runs and with which devices, or why it does not."""

    pod: str
    """NAMESPACE/NAME."""
    kind: str
    """The kind of its object."""
    node: str | None = None
    """The node that it was placed on."""
    devices: tuple[ChosenDevice, ...] = ()
    """The devices of its claims."""
    units: tuple[ChosenUnit, ...] = ()
    """The units of its limits."""
    fits: int = 0
    """The number of nodes that it fits on."""
    reasons: tuple[PendingReason, ...] = ()
    """Why it stays pending, the most frequent reason first."""


class NodeUse(Value):
    """What is used of a node after all pods were placed."""

    node: str
    """The name of the node."""
    pods: int
    """Pods that were placed on it."""
    devices: int
    """Devices and units that these pods have."""
    before: int
    """Devices that were in use on the snapshot."""
    free: int
    """Devices that can still be allocated at once, those first that take the least of a GPU."""


class SimulationResult(Value):
    """The result of a simulation."""

    pods: tuple[PodResult, ...]
    nodes: tuple[NodeUse, ...]
    unknown: tuple[str, ...] = ()
    """Facts that decide which devices nodes offer, and that their snapshots lack."""

    @property
    def is_blocked(self) -> bool:
        """Whether pods stay pending."""
        return self.pending > 0

    @property
    def pending(self) -> int:
        """The number of pods without a node."""
        return sum(pod.node is None for pod in self.pods)


def document_of(result: SimulationResult, notes: Sequence[str]) -> dict[str, object]:
    """The document of `--format json`."""
    return {
        "pods": result.pods,
        "nodes": result.nodes,
        "notes": notes,
        "unknown": result.unknown,
        "summary": {"placed": len(result.pods) - result.pending, "pending": result.pending},
    }


def pod_rows(result: SimulationResult) -> list[tuple[str, str, str]]:
    """Each pod, its node and its devices."""
    return [(pod.pod, pod.node or "-", _devices(pod) or "-") for pod in result.pods]


def node_rows(result: SimulationResult) -> list[tuple[str, ...]]:
    """Each node with pods, and what is used of it."""
    return [
        (each.node, str(each.pods), str(each.devices), str(each.before), str(each.free))
        for each in result.nodes
        if each.pods
    ]


def lines_about(result: SimulationResult) -> Iterator[str]:
    """Which pods are pending and why, and what is not used."""
    for pods, reasons in _by_reasons(result).items():
        yield f"pending: {pods}"
        yield from (f"  {_nodes(reason)}: {reason.text}" for reason in reasons)
    unused = sum(not each.pods for each in result.nodes)
    if unused:
        yield f"{counted(unused, 'node')} without pods"
    placed = len(result.pods) - result.pending
    chosen = "each pod on the node with the fewest free devices that it fits on"
    yield f"placed {placed} of {counted(len(result.pods), 'pod')}, {chosen}"


def _devices(pod: PodResult) -> str:
    """The devices of a pod; those of a GPU with its name."""
    of_claims = (f"{each.claim}: {_device(each.pool, each.device)}" for each in pod.devices)
    of_limits = (f"{each.resource}: {each.unit}" for each in pod.units)
    return ", ".join((*of_claims, *of_limits))


def _device(pool: str, device: str) -> str:
    """A device; if its name does not begin with its GPU, the GPU precedes it."""
    gpu = pool.partition("/")[2]
    return device if not gpu or device.startswith(gpu) else f"{gpu}/{device}"


def _by_reasons(result: SimulationResult) -> dict[str, tuple[PendingReason, ...]]:
    """The reasons of pending pods; pods in a row with the same reasons are one entry."""
    found: dict[str, tuple[PendingReason, ...]] = {}
    pending = [pod for pod in result.pods if pod.node is None]
    start = 0
    for end in range(1, len(pending) + 1):
        if end == len(pending) or pending[end].reasons != pending[start].reasons:
            first, last = pending[start].pod, pending[end - 1].pod
            name = first if end - start == 1 else f"{first} to {last} ({end - start} pods)"
            found[name] = pending[start].reasons
            start = end
    return found


def _nodes(reason: PendingReason) -> str:
    more = ", ..." if reason.count > len(reason.nodes) else ""
    return f"{counted(reason.count, 'node')} ({', '.join(reason.nodes)}{more})"
