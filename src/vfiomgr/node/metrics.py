"""What metrics say about devices, from the last scan: reading them touches no device.

Values that are unknown have no sample, since a number such as -1 would be wrong in sums. The text
is OpenMetrics, https://prometheus.io/docs/specs/om/open_metrics_spec/.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from prometheus_client.core import (
    CollectorRegistry,
    Counter,
    GaugeMetricFamily,
    Histogram,
)
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST

from vfiomgr.errors import Refusal
from vfiomgr.metrics.model import SHARED_METRICS, Families, Sample
from vfiomgr.metrics.render import openmetrics_of, render_openmetrics
from vfiomgr.metrics.samples import device_samples, group_samples, vgpu_samples
from vfiomgr.pci.error_counters import HealthFacts

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family

    from vfiomgr.node.model import Inventory, NodeUnit
    from vfiomgr.snapshot.model import HostSnapshot


ClaimOperation = Literal["prepare", "unprepare", "bind", "return"]
_NONE: Mapping[str, str] = MappingProxyType({})
METRICS: Families = SHARED_METRICS | {
    "vfiomgr_device_ready": (
        "gauge",
        "Whether a device can be given to a pod; else the reason.",
    ),
    "vfiomgr_device_allocated": ("gauge", "The container or ResourceClaim that has a device."),
    "vfiomgr_device_open": ("gauge", "Whether a process has the device open."),
    "vfiomgr_device_reset_required": (
        "gauge",
        "Whether a device is withheld until it is reset.",
    ),
}
"""The kind and the help text of each metric of a scan."""


def samples(
    host: HostSnapshot,
    inventory: Inventory,
    health: HealthFacts | None = None,
    created: Iterable[NodeUnit] = (),
    pods: Mapping[str, str] = _NONE,
) -> Iterator[Sample]:
    """The samples of a host.

    `health` has the numbers of errors, `created` the vGPUs that were created for claims, and `pods`
    the pods of claims.
    """
    units = list(inventory.units)
    owned = {address for unit in units for address in unit.addresses}
    devices = [device for device in host.devices if device.address in owned]
    yield from device_samples(host, devices, health or HealthFacts())
    for resource in inventory.resources:
        for unit in resource.units:
            yield from _ready(unit)
            yield from _allocated(unit, resource.name, pods)
            yield from _open(host, unit)
    for unit in inventory.on_demand:
        yield from _ready(unit)
        yield from _allocated(unit, "", pods)
        yield from _open(host, unit)
    for unit in created:
        yield from _allocated(unit, "", pods)
        yield from _open(host, unit)
    yield from group_samples(host, (unit.group for unit in units if unit.kind != "mdev"))
    yield from vgpu_samples(host)


def _ready(unit: NodeUnit) -> Iterator[Sample]:
    rules = dict.fromkeys(reason.rule for reason in unit.reasons)
    for rule in rules or [""]:
        yield "vfiomgr_device_ready", not rules, {"address": unit.id, "reason": rule}
    if "quarantine-unreadable" not in rules:
        yield "vfiomgr_device_reset_required", "reset-failed" in rules, {"address": unit.id}


def _allocated(unit: NodeUnit, resource: str, pods: Mapping[str, str]) -> Iterator[Sample]:
    """The container of a device from the device plugin, or its claim, with the pod if it is one."""
    claim = container = ""
    if unit.pod:  # NAMESPACE/POD or NAMESPACE/POD/CONTAINER
        namespace, pod, container = (*unit.pod.split("/", 2), "", "")[:3]
    elif unit.claim:
        namespace, _, claim = unit.claim.partition("/")
        pod, resource = pods.get(unit.claim, "").partition("/")[2], ""
    else:
        return
    labels = {
        "address": unit.id,
        "resource": resource,
        "namespace": namespace,
        "pod": pod,
        "container": container,
        "claim": claim,
    }
    yield "vfiomgr_device_allocated", 1, labels


def _open(host: HostSnapshot, unit: NodeUnit) -> Iterator[Sample]:
    if host.users.processes is not None:
        yield "vfiomgr_device_open", unit.is_open, {"address": unit.id}


CONTENT_TYPE: str = CONTENT_TYPE_LATEST
_END = "# EOF\n"
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)
_SECONDS_OF_CLAIMS = (0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 25.0, 45.0)
"""The kubelet waits for 45 s."""


def render(
    host: HostSnapshot,
    inventory: Inventory,
    health: HealthFacts,
    created: Iterable[NodeUnit] = (),
    pods: Mapping[str, str] = _NONE,
) -> str:
    """The samples of a scan as text, without the line that ends an exposition."""
    return render_openmetrics(samples(host, inventory, health, created, pods), METRICS)


class AgentMetrics:
    """The metrics of the agent itself, which follow those of the last scan."""

    def __init__(
        self, registered: Callable[[], Mapping[str, bool]], is_failed: Callable[[], bool]
    ) -> None:
        self._registry = CollectorRegistry()
        self._registered = registered
        self._is_failed = is_failed
        self._allocations = Histogram(
            "vfiomgr_allocate_seconds",
            "Time to answer an allocation.",
            ("resource",),
            registry=self._registry,
            buckets=_SECONDS,
        )
        self._claims = Histogram(
            "vfiomgr_claim_seconds",
            "Time to prepare or unprepare a ResourceClaim, and to bind or return its devices.",
            ("operation", "result"),
            registry=self._registry,
            buckets=_SECONDS_OF_CLAIMS,
        )
        self._failures = Counter(
            "vfiomgr_api_errors",
            "Failed requests to the API server, by HTTP status; no status without an answer.",
            ("verb", "resource", "status"),
            registry=self._registry,
        )
        self._registry.register(self)
        self.scanned = ""
        """The text of the last scan."""

    def observe(self, resource: str, seconds: float) -> None:
        """Count an allocation."""
        self._allocations.labels(resource).observe(seconds)

    @contextmanager
    def claim(self, operation: ClaimOperation) -> Iterator[None]:
        """Measure the work for a claim, and count its result."""
        begun, result = time.monotonic(), "failed"
        try:
            yield
            result = "done"
        except Refusal:
            result = "refused"
            raise
        finally:
            self._claims.labels(operation, result).observe(time.monotonic() - begun)

    def count_failure(self, verb: str, resource: str, status: int) -> None:
        """Count a request that the API server refused, or did not answer (status 0)."""
        self._failures.labels(verb, resource, str(status or "")).inc()

    def collect(self) -> Iterator[Family]:
        """The state of the registrations and of the last scan."""
        family = GaugeMetricFamily(
            "vfiomgr_kubelet_registered",
            "Whether the kubelet lists the devices of a resource.",
            labels=("resource",),
        )
        for resource, is_registered in self._registered().items():
            family.add_metric((resource,), is_registered)
        yield family
        yield GaugeMetricFamily(
            "vfiomgr_scan_failed",
            "Whether the last scan failed or found an invalid layout.",
            value=self._is_failed(),
        )

    def text(self) -> bytes:
        """All metrics."""
        return f"{self.scanned}{openmetrics_of(self._registry)}{_END}".encode()
