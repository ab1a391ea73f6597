"""Pods, claims and nodes of a simulation, and its result.

Source of the names and rules: api/resource/v1/types.go of k8s.io/api.
"""

from __future__ import annotations

from typing import Literal

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
    """Devices that could still be allocated, each alone."""


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
