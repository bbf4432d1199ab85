"""Metrics for Prometheus, read when they are asked for: nothing runs in between.

    from prometheus_client import REGISTRY
    from aioprefetch.prometheus import PrefetchCollector

    REGISTRY.register(PrefetchCollector({"train": prefetcher}))

Needs the extra ``prometheus``. docs/seeing.md has a table of the metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ._stats import Stats

__all__ = ["PrefetchCollector"]


class HasStats(Protocol):
    """A Prefetcher or a pool."""

    def stats(self) -> Stats: ...


_COUNTERS = (
    ("delivered", "delivered", "Batches handed over."),
    ("bytes", "bytes", "Bytes of the batches that came."),
    ("elapsed_seconds", "elapsed", "Seconds of iteration."),
    ("wait_seconds", "wait", "Seconds that the consumer waited."),
    ("decode_seconds", "decode", "Seconds that batches took to be rebuilt and transferred."),
    ("restarts", "restarts", "Workers that took a dead one's place."),
    ("retries", "retries", "Tasks that ran again after a death."),
    ("skipped", "skipped", "Items left out by on_error."),
)
_GAUGES = (
    ("in_flight", "in_flight", "Batches requested and not delivered."),
    ("ready", "ready", "Batches made and not delivered."),
    ("queue_wait_seconds", "queue_wait", "Mean wait of a batch while no worker worked on it."),
)
_QUANTILES = {"0.5": "task_p50", "0.9": "task_p90", "0.99": "task_p99"}


class PrefetchCollector(Collector):
    """Reads `stats` of Prefetchers and pools whenever a scrape asks.

    Parameters
    ----------
    sources
        Prefetchers and pools by the name that is their label. Those added to the mapping later
        are seen too. It keeps them alive: take out what you drop.
    prefix
        What the names of the metrics begin with.
    """

    def __init__(self, sources: Mapping[str, HasStats], *, prefix: str = "aioprefetch") -> None:
        self._sources = sources
        self._prefix = prefix

    def describe(self) -> Iterator[Metric]:
        """The metrics without values, so that registering reads nothing."""
        return self._families({})

    def collect(self) -> Iterator[Metric]:
        """The metrics, read now."""
        return self._families(
            {name: source.stats() for name, source in list(self._sources.items())}
        )

    def _families(self, stats: Mapping[str, Stats]) -> Iterator[Metric]:
        for name, field, text in _COUNTERS:
            counter = CounterMetricFamily(f"{self._prefix}_{name}", text, labels=["name"])
            for label, values in stats.items():
                counter.add_metric([label], getattr(values, field))
            yield counter
        for name, field, text in _GAUGES:
            gauge = GaugeMetricFamily(f"{self._prefix}_{name}", text, labels=["name"])
            for label, values in stats.items():
                gauge.add_metric([label], getattr(values, field))
            yield gauge
        yield self._tasks(stats)
        yield self._busy(stats)

    def _tasks(self, stats: Mapping[str, Stats]) -> Metric:
        text = "Seconds that a task takes a worker, by quantile."
        gauge = GaugeMetricFamily(f"{self._prefix}_task_seconds", text, labels=["name", "quantile"])
        for label, values in stats.items():
            for quantile, field in _QUANTILES.items():
                gauge.add_metric([label, quantile], getattr(values, field))
        return gauge

    def _busy(self, stats: Mapping[str, Stats]) -> Metric:
        text = "Share of the time that each part was at work; what is near 1 is the bottleneck."
        gauge = GaugeMetricFamily(f"{self._prefix}_busy_ratio", text, labels=["name", "part"])
        for label, values in stats.items():
            for part, share in values.busy._asdict().items():
                gauge.add_metric([label, part], share)
        return gauge
