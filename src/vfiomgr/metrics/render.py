"""Metrics as text: for node-exporter's textfile collector, and OpenMetrics for the agent.

Prometheus' text format has no kind `info`, and its counters are named with their suffix: the
library writes `x_info` as a gauge and `x_total` as a counter
(https://prometheus.io/docs/instrumenting/exposition_formats/). OpenMetrics:
https://prometheus.io/docs/specs/om/open_metrics_spec/.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CollectorRegistry,
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

if TYPE_CHECKING:
    from vfiomgr.metrics.model import Families, Kind, Sample

    Family = GaugeMetricFamily | CounterMetricFamily | InfoMetricFamily

_KINDS: dict[Kind, type[Family]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "info": InfoMetricFamily,
}
_END = "# EOF\n"


def render_textfile(samples: Iterable[Sample], families: Families) -> str:
    """Samples in Prometheus' text format, version 0.0.4."""
    return generate_latest(_registry(samples, families)).decode()


def render_openmetrics(samples: Iterable[Sample], families: Families) -> str:
    """Samples as OpenMetrics, without the line that ends an exposition."""
    return openmetrics_of(_registry(samples, families))


def openmetrics_of(registry: CollectorRegistry) -> str:
    """The metrics of a registry as OpenMetrics, without the line that ends an exposition."""
    data: bytes = generate_openmetrics(registry)  # type: ignore[no-untyped-call]
    return data.decode().removesuffix(_END)


def _registry(samples: Iterable[Sample], families: Families) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(_Collected(samples, families))
    return registry


class _Collected:
    def __init__(self, samples: Iterable[Sample], families: Families) -> None:
        self._families: dict[str, Family] = {}
        for name, value, labels in samples:
            if name not in self._families:
                kind, text = families[name]
                self._families[name] = _KINDS[kind](name, text, labels=list(labels))
            family = self._families[name]
            if isinstance(family, InfoMetricFamily):
                family.add_metric(list(labels.values()), {})
            else:
                family.add_metric(list(labels.values()), value)

    def collect(self) -> Iterable[Family]:
        """The metrics that have samples."""
        return self._families.values()
