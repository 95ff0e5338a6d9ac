"""Metrics of one process: the catalogue's metrics in a registry of their own (no global state)."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from moebus.observability.catalogue import CATALOGUE, CounterName, GaugeName, HistogramName


class Metrics:
    """Thread-safe. Labels are keyword arguments and must be those of the catalogue."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        for m in CATALOGUE:
            if m.kind == "counter":
                self._counters[m.name] = Counter(m.name, m.meaning, m.labels, registry=self.registry)
            elif m.kind == "gauge":
                self._gauges[m.name] = Gauge(m.name, m.meaning, m.labels, registry=self.registry)
            else:
                self._histograms[m.name] = Histogram(
                    m.name, m.meaning, m.labels, buckets=m.buckets, registry=self.registry
                )
        self.set("moebus_build_info", 1, version=moebus_version(), python=platform.python_version())

    def inc(self, name: CounterName, amount: float = 1, **labels: str) -> None:
        """Adds to a counter."""
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(amount)

    def set(self, name: GaugeName, value: float, **labels: str) -> None:
        """Sets a gauge."""
        gauge = self._gauges[name]
        (gauge.labels(**labels) if labels else gauge).set(value)

    def observe(self, name: HistogramName, seconds: float, **labels: str) -> None:
        """Records one duration."""
        histogram = self._histograms[name]
        (histogram.labels(**labels) if labels else histogram).observe(seconds)

    def value(self, name: str, **labels: str) -> float:
        """The value of one sample (`..._total`, `..._sum`, `..._count` or a gauge); 0.0 if it was never touched."""
        return self.registry.get_sample_value(name, labels) or 0.0

    def text(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


def moebus_version() -> str:
    """The installed version, `unknown` when run from an uninstalled tree."""
    try:
        return version("moebus")
    except PackageNotFoundError:
        return "unknown"
