"""Metrics as OpenMetrics text, https://prometheus.io/docs/specs/om/open_metrics_spec/."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    Histogram,
    InfoMetricFamily,
)
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client.core import Metric as Family

    from vfiomgr.node.metrics import Metric, Sample

__all__ = ["CONTENT_TYPE_LATEST", "AgentMetrics", "render"]

_END = "# EOF\n"
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)


def render(samples: Iterable[Sample]) -> str:
    """The samples of a scan as text, without the line that ends an exposition."""
    registry = CollectorRegistry()
    registry.register(_Collected(tuple(samples)))
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
        self._registry.register(self)
        self.scanned = ""
        """The text of the last scan."""

    def observe(self, resource: str, seconds: float) -> None:
        """Count an allocation."""
        self._allocations.labels(resource).observe(seconds)

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
