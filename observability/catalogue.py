"""Every metric of moebus: name, kind, labels and meaning, in one typed table.

Rules: prefix `moebus_`, base units (seconds, bytes), `_total` for counters, no ids as labels. Docs and dashboards are
made from this table; `Metrics` accepts only these names, so a misspelt one is a type error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

CounterName = Literal[
    "moebus_records_appended_total",
    "moebus_appended_bytes_total",
    "moebus_writer_rebuilds_total",
    "moebus_dead_letters_total",
    "moebus_control_operations_total",
    "moebus_control_answers_total",
    "moebus_worker_heartbeats_total",
    "moebus_routes_rollouts_total",
    "moebus_routes_records_total",
    "moebus_routes_bytes_total",
    "moebus_routes_recovered_total",
    "moebus_routes_publisher_restarts_total",
    "moebus_routes_set_aside_total",
    "moebus_routes_bases_refused_total",
    "moebus_store_records_total",
    "moebus_store_bytes_total",
    "moebus_store_deleted_rollouts_total",
    "moebus_store_repeated_rollouts_total",
    "moebus_blobs_operations_total",
    "moebus_blobs_bytes_total",
    "moebus_blobs_swept_total",
    "moebus_mirror_operations_total",
    "moebus_mirror_bytes_total",
    "moebus_mirror_dropped_total",
    "moebus_reader_resolved_total",
    "moebus_engine_requests_total",
    "moebus_engine_tokens_total",
]
GaugeName = Literal[
    "moebus_build_info",
    "moebus_worker_lifecycle",
    "moebus_worker_tag_bytes",
    "moebus_worker_applied_offset",
    "moebus_routes_buffer_bytes",
    "moebus_store_rollouts",
    "moebus_store_used_bytes",
    "moebus_store_lag_records",
    "moebus_store_ingest_stopped",
    "moebus_mirror_up",
    "moebus_mirror_held",
    "moebus_mirror_waiting",
]
HistogramName = Literal[
    "moebus_control_operation_duration_seconds",
    "moebus_control_command_duration_seconds",
    "moebus_routes_publish_duration_seconds",
    "moebus_store_readable_delay_seconds",
    "moebus_store_commit_duration_seconds",
    "moebus_blobs_operation_duration_seconds",
    "moebus_reader_resolve_duration_seconds",
    "moebus_gateway_request_duration_seconds",
]
Kind = Literal["counter", "gauge", "histogram"]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the catalogue. `buckets` (upper bounds, seconds) only for histograms."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = SECONDS


def _counter(name: CounterName, meaning: str, *labels: str) -> Metric:
    return Metric(name, "counter", labels, meaning)


def _gauge(name: GaugeName, meaning: str, *labels: str) -> Metric:
    return Metric(name, "gauge", labels, meaning)


def _histogram(name: HistogramName, meaning: str, *labels: str) -> Metric:
    return Metric(name, "histogram", labels, meaning)


CATALOGUE: tuple[Metric, ...] = (
    _gauge("moebus_build_info", "1; the labels say which version runs", "version", "python"),
    _counter(
        "moebus_records_appended_total", "Records whose receipt settled, by topic and outcome", "topic", "outcome"
    ),
    _counter("moebus_appended_bytes_total", "Key and value bytes of acknowledged records", "topic"),
    _counter("moebus_writer_rebuilds_total", "Times a Kafka producer was replaced after a fault"),
    _counter("moebus_dead_letters_total", "Records put aside in the dead-letter topic", "reason"),
    _counter("moebus_control_operations_total", "Operations that a client issued and saw end", "method", "status"),
    _histogram("moebus_control_operation_duration_seconds", "From append to outcome, at the client", "method"),
    _counter("moebus_control_answers_total", "Final answers of the workers in this process", "method", "code"),
    _histogram("moebus_control_command_duration_seconds", "From read to acknowledged answer, at the worker", "method"),
    _gauge("moebus_worker_lifecycle", "Workers of this process in each lifecycle state", "lifecycle"),
    _gauge("moebus_worker_tag_bytes", "Device bytes held, by memory tag", "tag"),
    _gauge("moebus_worker_applied_offset", "Smallest next offset of the command log over this process's workers"),
    _counter("moebus_worker_heartbeats_total", "Member states acknowledged"),
    _counter("moebus_routes_rollouts_total", "Rollouts submitted, by how their receipt settled", "outcome"),
    _counter("moebus_routes_records_total", "Route records sent and acknowledged", "kind"),
    _counter("moebus_routes_bytes_total", "Bytes of acknowledged route records"),
    _counter("moebus_routes_recovered_total", "Rollouts and fences found unsent in the journal at start"),
    _counter("moebus_routes_publisher_restarts_total", "Times the publisher's process ended and was started again"),
    _counter("moebus_routes_set_aside_total", "Journal entries that ended the publisher's process again and again"),
    _counter("moebus_routes_bases_refused_total", "Rollouts whose base could not be used, so that all was sent"),
    _gauge("moebus_routes_buffer_bytes", "Bytes of routes waiting for their acknowledgement"),
    _histogram("moebus_routes_publish_duration_seconds", "From submit to the acknowledgement of the END record"),
    _counter("moebus_store_records_total", "Route records ingested, by kind and outcome", "kind", "outcome"),
    _counter("moebus_store_bytes_total", "Bytes of route records ingested"),
    _histogram(
        "moebus_store_readable_delay_seconds", "From the append time of a rollout's END to readable in the store"
    ),
    _histogram("moebus_store_commit_duration_seconds", "One batch committed with fsync"),
    _counter("moebus_store_deleted_rollouts_total", "Rollouts removed, by cause", "cause"),
    _counter("moebus_store_repeated_rollouts_total", "Complete attempts beside another of the same identity"),
    _counter(
        "moebus_blobs_operations_total", "Requests to the objects that hold blobs, by outcome", "operation", "outcome"
    ),
    _counter("moebus_blobs_bytes_total", "Bytes of blobs put among objects, or got from them", "operation"),
    _counter("moebus_blobs_swept_total", "Objects deleted because no index named them (left by crashes and failures)"),
    _histogram("moebus_blobs_operation_duration_seconds", "One request to the objects that hold blobs", "operation"),
    _counter(
        "moebus_mirror_operations_total", "Rollouts put into and deleted from mirrors", "mirror", "operation", "outcome"
    ),
    _counter("moebus_mirror_bytes_total", "Bytes put into mirrors", "mirror"),
    _counter("moebus_mirror_dropped_total", "Changes that found no place to wait; they are caught up", "mirror"),
    _gauge("moebus_mirror_up", "1 while the mirror's target takes what it is given", "mirror"),
    _gauge("moebus_mirror_held", "Rollouts that the mirror's target holds", "mirror"),
    _gauge("moebus_mirror_waiting", "Changes that wait for the mirror", "mirror"),
    _gauge("moebus_store_rollouts", "Whole rollouts held"),
    _gauge("moebus_store_used_bytes", "Bytes in use inside the store's maps"),
    _gauge("moebus_store_lag_records", "Records between the store's position and the log end", "partition"),
    _gauge("moebus_store_ingest_stopped", "1 while a partition cannot ingest (disk or map full)", "partition"),
    _counter("moebus_reader_resolved_total", "Rollouts asked for by a reader, by outcome", "outcome"),
    _histogram("moebus_reader_resolve_duration_seconds", "From resolve to a whole batch in memory"),
    _histogram("moebus_gateway_request_duration_seconds", "One request of the HTTP gateway", "path", "status"),
    _counter("moebus_engine_requests_total", "Requests finished by an in-process engine", "finish_reason"),
    _counter("moebus_engine_tokens_total", "Tokens handled: prompt (computed), cached (prefix hits), output", "kind"),
)


def names() -> frozenset[str]:
    """Every name that the type checker accepts; a test holds it against the table."""
    return frozenset((*get_args(CounterName), *get_args(GaugeName), *get_args(HistogramName)))
