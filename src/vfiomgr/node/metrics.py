"""What metrics say about devices, from the last scan: reading them touches no device.

Values that are unknown have no sample, since a number such as -1 would be wrong in sums. The text
is OpenMetrics, https://prometheus.io/docs/specs/om/open_metrics_spec/.
"""

from __future__ import annotations

import collections
import time
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

from vfiomgr.errors import Refusal
from vfiomgr.pci.error_counters import HealthFacts
from vfiomgr.vgpu.capacity import gpus, rooms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.core import Metric as Family

    from vfiomgr.node.model import Inventory, NodeUnit
    from vfiomgr.pci.model import PciDevice
    from vfiomgr.snapshot.model import HostSnapshot
    from vfiomgr.vgpu.capacity import Gpu
    from vfiomgr.vgpu.model import Vgpu


ClaimOperation = Literal["prepare", "unprepare", "bind", "return"]
Sample = tuple[str, float, dict[str, str]]
"""The name of a metric, without the suffix of its kind, a value and its labels."""
_TRANSFERS = 1_000_000_000
"""Transfers per second in a GT/s."""
_NONE: Mapping[str, str] = MappingProxyType({})
_Kind = type[GaugeMetricFamily] | type[CounterMetricFamily] | type[InfoMetricFamily]
METRICS: dict[str, tuple[_Kind, str]] = {
    "vfiomgr_device": (InfoMetricFamily, "A function of a device that is offered to pods."),
    "vfiomgr_device_ready": (
        GaugeMetricFamily,
        "Whether a device can be given to a pod; else the reason.",
    ),
    "vfiomgr_group_viable": (GaugeMetricFamily, "Whether an IOMMU group can be assigned."),
    "vfiomgr_device_allocated": (
        GaugeMetricFamily,
        "The container or ResourceClaim that has a device.",
    ),
    "vfiomgr_device_open": (GaugeMetricFamily, "Whether a process has the device open."),
    "vfiomgr_device_reset_required": (
        GaugeMetricFamily,
        "Whether a device is withheld until it is reset.",
    ),
    "vfiomgr_aer_errors": (CounterMetricFamily, "Errors of PCI Express since boot."),
    "vfiomgr_link_lanes": (GaugeMetricFamily, "The width of a PCIe link."),
    "vfiomgr_link_transfers_per_second": (GaugeMetricFamily, "The speed of a PCIe link."),
    "vfiomgr_vgpus": (GaugeMetricFamily, "vGPUs by GPU and type, active and still available."),
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
    yield from map(_info, devices)
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
    yield from _groups(host, units)
    yield from _errors(devices, health or HealthFacts())
    yield from _links(host, devices)
    yield from _vgpus(host)


def _info(device: PciDevice) -> Sample:
    group, node = device.iommu_group, device.numa_node
    labels = {
        "address": str(device.address),
        "vendor": device.vendor_id,
        "device": device.device_id,
        "driver": device.driver or "",
        "iommu_group": "" if group is None else str(group),
        "numa_node": "" if node is None else str(node),
    }
    return "vfiomgr_device", 1, labels


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


def _groups(host: HostSnapshot, units: Iterable[NodeUnit]) -> Iterator[Sample]:
    numbers = {unit.group for unit in units if unit.kind != "mdev" and unit.group is not None}
    for number in sorted(numbers):
        if host.group(number) is not None:
            yield "vfiomgr_group_viable", host.is_viable(number), {"iommu_group": str(number)}


def _errors(devices: Iterable[PciDevice], health: HealthFacts) -> Iterator[Sample]:
    for device in devices:
        found = health.of(device.address)
        for severity in ("correctable", "nonfatal", "fatal"):
            number = getattr(found, severity, None)
            if number is not None:
                labels = {"address": str(device.address), "severity": severity}
                yield "vfiomgr_aer_errors", number, labels


def _links(host: HostSnapshot, devices: Iterable[PciDevice]) -> Iterator[Sample]:
    owned = {device.address for device in devices}
    for link in host.links or ():
        if link.address not in owned:
            continue
        found = (
            ("lanes", "current", link.width, 1),
            ("lanes", "maximum", link.max_width, 1),
            ("transfers_per_second", "current", link.speed, _TRANSFERS),
            ("transfers_per_second", "maximum", link.max_speed, _TRANSFERS),
        )
        for name, bound, number, unit in found:
            if number is not None:
                labels = {"address": str(link.address), "bound": bound}
                yield f"vfiomgr_link_{name}", number * unit, labels


def _vgpus(host: HostSnapshot) -> Iterator[Sample]:
    """The vGPUs of each GPU by type, and how many more have room."""
    for gpu in gpus(host):
        active = collections.Counter(_type_of(gpu, vgpu) for vgpu in gpu.instances)
        free = {room.type.name or room.type.id: room.more for room in rooms(gpu)}
        for state, found in (("active", active), ("available", free)):
            for name, number in sorted(found.items()):
                yield "vfiomgr_vgpus", number, {"parent": gpu.name, "type": name, "state": state}


def _type_of(gpu: Gpu, vgpu: Vgpu) -> str:
    known = (kind.name for kind in gpu.types if kind.id == vgpu.type)
    return vgpu.type_name or next(filter(None, known), vgpu.type)


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
    registry = CollectorRegistry()
    registry.register(_Collected(samples(host, inventory, health, created, pods)))
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
        return f"{self.scanned}{_text(self._registry)}{_END}".encode()


class _Collected:
    def __init__(self, samples: Iterable[Sample]) -> None:
        self._families: dict[str, GaugeMetricFamily | CounterMetricFamily | InfoMetricFamily] = {}
        for name, value, labels in samples:
            if name not in self._families:
                kind, text = METRICS[name]
                self._families[name] = kind(name, text, labels=list(labels))
            family = self._families[name]
            if isinstance(family, InfoMetricFamily):
                family.add_metric(list(labels.values()), {})
            else:
                family.add_metric(list(labels.values()), value)

    def collect(self) -> Iterable[Family]:
        """The metrics that have samples."""
        return self._families.values()


def _text(registry: CollectorRegistry) -> str:
    data: bytes = generate_latest(registry)  # type: ignore[no-untyped-call]
    return data.decode().removesuffix(_END)
