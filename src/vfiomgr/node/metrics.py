"""What metrics say about devices, from the last scan: reading them touches no device.

Values that are unknown have no sample, since a number such as -1 would be wrong in sums. The text
is OpenMetrics, https://prometheus.io/docs/specs/om/open_metrics_spec/.
"""

from __future__ import annotations

import collections
import time
from collections import defaultdict
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from prometheus_client.core import (
    CollectorRegistry,
    Counter,
    CounterMetricFamily,
    GaugeMetricFamily,
    Histogram,
    InfoMetricFamily,
)
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

from vfiomgr.node.model import HealthFacts
from vfiomgr.value import Value
from vfiomgr.vgpu.capacity import gpus, rooms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.core import Metric as Family

    from vfiomgr.node.model import Inventory, NodeUnit
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.capacity import Gpu
    from vfiomgr.vgpu.model import Vgpu


MetricKind = Literal["gauge", "counter", "info"]
_TRANSFERS = 1_000_000_000
"""Transfers per second in a GT/s."""
_RESET_RULES = frozenset({"reset-failed"})
_NONE: Mapping[str, str] = MappingProxyType({})


class Metric(Value):
    """A metric: its name without the suffix of its kind, and its help text."""

    name: str
    kind: MetricKind
    help: str


class Sample(Value):
    """One value of a metric."""

    metric: Metric
    labels: tuple[tuple[str, str], ...]
    value: float


INFO = Metric("vfiomgr_device", "info", "A function of a device that is offered to pods.")
READY = Metric(
    "vfiomgr_device_ready", "gauge", "Whether a device can be given to a pod; else the reason."
)
VIABLE = Metric("vfiomgr_group_viable", "gauge", "Whether an IOMMU group can be assigned.")
ALLOCATED = Metric(
    "vfiomgr_device_allocated", "gauge", "The container or ResourceClaim that has a device."
)
OPEN = Metric("vfiomgr_device_open", "gauge", "Whether a process has the device open.")
RESET = Metric(
    "vfiomgr_device_reset_required", "gauge", "Whether a device is withheld until it is reset."
)
ERRORS = Metric("vfiomgr_aer_errors", "counter", "Errors of PCI Express since boot.")
LANES = Metric("vfiomgr_link_lanes", "gauge", "The width of a PCIe link.")
TRANSFERS = Metric("vfiomgr_link_transfers_per_second", "gauge", "The speed of a PCIe link.")
VGPUS = Metric("vfiomgr_vgpus", "gauge", "vGPUs by GPU and type, active and still available.")
METRICS = (INFO, READY, VIABLE, ALLOCATED, OPEN, RESET, ERRORS, LANES, TRANSFERS, VGPUS)


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
    yield from map(_info, devices)
    for resource in inventory.resources:
        for unit in resource.units:
            yield from _ready(unit)
            yield from _allocated(resource.name, unit)
            yield from _claimed(unit, pods)
            yield from _open(host, unit)
    for unit in created:
        yield from _claimed(unit, pods)
        yield from _open(host, unit)
    yield from _groups(host, units)
    yield from _errors(devices, health or HealthFacts())
    yield from _links(host, devices)
    yield from _vgpus(host)


def _sample(metric: Metric, value: float, **labels: str) -> Sample:
    return Sample(metric, tuple(labels.items()), float(value))


def _info(device: PciDevice) -> Sample:
    known = {"iommu_group": device.iommu_group, "numa_node": device.numa_node}
    return _sample(
        INFO,
        1,
        address=str(device.address),
        vendor=device.vendor_id,
        device=device.device_id,
        driver=device.driver or "",
        **{name: "" if number is None else str(number) for name, number in known.items()},
    )


def _ready(unit: NodeUnit) -> Iterator[Sample]:
    rules = dict.fromkeys(reason.rule for reason in unit.reasons)
    for rule in rules:
        yield _sample(READY, 0, address=unit.id, reason=rule)
    if not rules:
        yield _sample(READY, 1, address=unit.id, reason="")
    is_needed = not _RESET_RULES.isdisjoint(rules)
    yield _sample(RESET, is_needed, address=unit.id)


def _allocated(resource: str, unit: NodeUnit) -> Iterator[Sample]:
    """For a device that a pod has, NAMESPACE/POD or NAMESPACE/POD/CONTAINER."""
    if unit.pod:
        namespace, pod, container = (*unit.pod.split("/", 2), "", "")[:3]
        yield _sample(
            ALLOCATED,
            1,
            address=unit.id,
            resource=resource,
            namespace=namespace,
            pod=pod,
            container=container,
            claim="",
        )


def _claimed(unit: NodeUnit, pods: Mapping[str, str]) -> Iterator[Sample]:
    """For a device that a claim has; the pod only if it is one."""
    if unit.claim and not unit.pod:
        namespace, _, claim = unit.claim.partition("/")
        pod = pods.get(unit.claim, "").partition("/")[2]
        yield _sample(
            ALLOCATED,
            1,
            address=unit.id,
            resource="",
            namespace=namespace,
            pod=pod,
            container="",
            claim=claim,
        )


def _open(host: HostSnapshot, unit: NodeUnit) -> Iterator[Sample]:
    if host.users.processes is not None:
        yield _sample(OPEN, unit.is_open, address=unit.id)


def _groups(host: HostSnapshot, units: Iterable[NodeUnit]) -> Iterator[Sample]:
    numbers = {unit.group for unit in units if unit.kind != "mdev" and unit.group is not None}
    for number in sorted(numbers):
        if host.group(number) is not None:
            yield _sample(VIABLE, host.is_viable(number), iommu_group=str(number))


def _errors(devices: Iterable[PciDevice], health: HealthFacts) -> Iterator[Sample]:
    for device in devices:
        found = health.of(device.address)
        for severity in ("correctable", "nonfatal", "fatal"):
            number = getattr(found, severity, None)
            if number is not None:
                yield _sample(ERRORS, number, address=str(device.address), severity=severity)


def _links(host: HostSnapshot, devices: Iterable[PciDevice]) -> Iterator[Sample]:
    owned = {device.address for device in devices}
    for link in host.links or ():
        if link.address not in owned:
            continue
        found = (
            (LANES, "current", link.width, 1),
            (LANES, "maximum", link.max_width, 1),
            (TRANSFERS, "current", link.speed, _TRANSFERS),
            (TRANSFERS, "maximum", link.max_speed, _TRANSFERS),
        )
        for metric, bound, number, unit in found:
            if number is not None:
                yield _sample(metric, number * unit, address=str(link.address), bound=bound)


def _vgpus(host: HostSnapshot) -> Iterator[Sample]:
    """The vGPUs of each GPU by type, and how many more have room."""
    for gpu in gpus(host):
        active = collections.Counter(_type_of(gpu, vgpu) for vgpu in gpu.instances)
        free = {room.type.name or room.type.id: room.more for room in rooms(gpu)}
        for state, found in (("active", active), ("available", free)):
            for name, number in sorted(found.items()):
                yield _sample(VGPUS, number, parent=gpu.name, type=name, state=state)


def _type_of(gpu: Gpu, vgpu: Vgpu) -> str:
    known = (kind.name for kind in gpu.types if kind.id == vgpu.type)
    return vgpu.type_name or next(filter(None, known), vgpu.type)


__all__ = ["CONTENT_TYPE_LATEST", "AgentMetrics", "render"]

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
    registry = CollectorRegistry()
    registry.register(_Collected(tuple(samples(host, inventory, health, created, pods))))
    return _text(registry)


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
            "Time to prepare or unprepare a ResourceClaim, by its result.",
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
    def claim(self, operation: Literal["prepare", "unprepare"]) -> Iterator[None]:
        """Measure the work for a claim, and count its result."""
        begun, result = time.monotonic(), "failed"
        try:
            yield
            result = "done"
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
        return f"{self.scanned}{_text(self._registry)}{_END}".encode()


class _Collected:
    """A collector of values that exist already."""

    def __init__(self, samples: tuple[Sample, ...]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Family]:
        """The samples by metric."""
        by_metric: defaultdict[Metric, list[Sample]] = defaultdict(list)
        for sample in self._samples:
            by_metric[sample.metric].append(sample)
        for metric, samples in by_metric.items():
            yield _family(metric, samples)


def _family(metric: Metric, samples: list[Sample]) -> Family:
    names = [name for name, _ in samples[0].labels]
    if metric.kind == "info":
        info = InfoMetricFamily(metric.name, metric.help, labels=names)
        for sample in samples:
            info.add_metric([value for _, value in sample.labels], {})
        return info
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=names)
    for sample in samples:
        family.add_metric([value for _, value in sample.labels], sample.value)
    return family


def _text(registry: CollectorRegistry) -> str:
    data: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return data.decode().removesuffix(_END)
