"""Writes Grafana's dashboard: `python -m moebus.observability.dashboard deploy/grafana/dashboards/moebus.json`.

One panel a metric of the catalogue, by kind: counters as rates, gauges as they are, histograms as median and 99th
percentile. The panel's help text is the metric's meaning.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from moebus.observability.catalogue import CATALOGUE, Metric

UID = "moebus"
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
ROWS = {
    "Control": ("moebus_control_", "moebus_worker_"),
    "Routes": ("moebus_routes_", "moebus_reader_"),
    "Store": ("moebus_store_",),
    "Engine": ("moebus_engine_",),
    "Log and processes": ("moebus_",),
}
"""Row -> beginnings of the names in it; the first row that fits takes a metric."""
_SELECT = '{instance=~"$instance"}'
_WIDTH, _HEIGHT, _ACROSS = 8, 7, 3


def dashboard() -> dict[str, object]:
    """The dashboard as Grafana imports it; a test holds the file against it."""
    panels: list[dict[str, object]] = []
    top = 0
    for title, metrics in rows().items():
        panels.append({"type": "row", "title": title, "collapsed": False, "panels": [], **_place(0, top, 24, 1)})
        top += 1
        for index, metric in enumerate(metrics):
            across, down = index % _ACROSS, index // _ACROSS
            panels.append(_panel(metric, _place(across * _WIDTH, top + down * _HEIGHT, _WIDTH, _HEIGHT)))
        top += -(-len(metrics) // _ACROSS) * _HEIGHT
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    return {
        "uid": UID,
        "title": "moebus",
        "tags": ["moebus"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_instances()]},
        "panels": panels,
    }


def rows() -> dict[str, list[Metric]]:
    """The catalogue, shared out over the rows."""
    shared: dict[str, list[Metric]] = {title: [] for title in ROWS}
    for metric in CATALOGUE:
        title = next(title for title, beginnings in ROWS.items() if metric.name.startswith(beginnings))
        shared[title].append(metric)
    return shared


def _instances() -> dict[str, object]:
    return {
        "name": "instance",
        "label": "process",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(moebus_build_info, instance)", "refId": "instances"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, object]:
    return {"gridPos": {"x": x, "y": y, "w": width, "h": height}}


def _panel(metric: Metric, place: dict[str, object]) -> dict[str, object]:
    targets = [
        {"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
        for i, (expression, legend) in enumerate(_queries(metric))
    ]
    return {
        "type": "timeseries",
        "title": metric.name.removeprefix("moebus_"),
        "description": metric.meaning,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": {"unit": _unit(metric), "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": targets,
        **place,
    }


def _queries(metric: Metric) -> Iterator[tuple[str, str]]:
    """(PromQL, legend) of each line of the panel."""
    by = ", ".join(metric.labels or ("instance",))
    legend = " ".join(f"{{{{{label}}}}}" for label in metric.labels or ("instance",))
    if metric.kind == "gauge":
        yield f"sum by ({by}) ({metric.name}{_SELECT})", legend
    elif metric.kind == "counter":
        yield f"sum by ({by}) (rate({metric.name}{_SELECT}[$__rate_interval]))", legend
    else:
        for quantile in (0.5, 0.99):
            buckets = f"sum by (le, {by}) (rate({metric.name}_bucket{_SELECT}[$__rate_interval]))"
            yield f"histogram_quantile({quantile}, {buckets})", f"p{quantile * 100:g} {legend}"


def _unit(metric: Metric) -> str:
    """Grafana's name of the unit."""
    if metric.kind == "counter":
        return "Bps" if metric.name.endswith("_bytes_total") else "ops"
    if metric.name.endswith("_seconds"):
        return "s"
    return "bytes" if metric.name.endswith("_bytes") else "short"


def page() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), "utf-8")
