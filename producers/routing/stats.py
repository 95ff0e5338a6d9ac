"""What a publisher did so far, as a value; and the same counted in the metrics."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from moebus.observability.metrics import Metrics

Ending = Literal["stored", "failed", "dropped", "suspended", "skipped"]


@dataclass(frozen=True, slots=True)
class PublisherStats:
    """Counts since the start. `waiting`, `buffer_bytes`: now. `skipped`: not sampled. `base_refused`: submissions
    whose base could not be used, so that everything was sent. `recovered`: what a publisher before left in the
    journal. `set_aside`: entries of the journal that ended the child again and again. `wire_bytes`: record values
    acknowledged."""

    submitted: int = 0
    stored: int = 0
    failed: int = 0
    dropped: int = 0
    suspended: int = 0
    skipped: int = 0
    base_refused: int = 0
    recovered: int = 0
    set_aside: int = 0
    records: int = 0
    wire_bytes: int = 0
    waiting: int = 0
    buffer_bytes: int = 0


class Counters:
    """Thread-safe counts behind `PublisherStats`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()  # by field of PublisherStats; cheaper on the caller's thread than that

    def submitted(self, base_refused: bool) -> None:
        with self._lock:
            self._counts["submitted"] += 1
            self._counts["base_refused"] += base_refused

    def ended(self, ending: Ending) -> None:
        """A rollout is settled."""
        self._metrics.inc("moebus_routes_rollouts_total", outcome=ending)
        with self._lock:
            self._counts[ending] += 1

    def recovered(self) -> None:
        """Something unsent was found in the journal."""
        self._metrics.inc("moebus_routes_recovered_total")
        with self._lock:
            self._counts["recovered"] += 1

    def set_aside(self) -> None:
        """An entry of the journal is not tried any more."""
        self._metrics.inc("moebus_routes_set_aside_total")
        with self._lock:
            self._counts["set_aside"] += 1

    def acknowledged(self, kinds: dict[str, int], wire_bytes: int) -> None:
        """Records of a settled job: how many of each kind, and the bytes of their values."""
        for kind, count in kinds.items():
            self._metrics.inc("moebus_routes_records_total", count, kind=kind)
        self._metrics.inc("moebus_routes_bytes_total", wire_bytes)
        with self._lock:
            self._counts["records"] += sum(kinds.values())
            self._counts["wire_bytes"] += wire_bytes

    def buffer(self, used: int) -> None:
        self._metrics.set("moebus_routes_buffer_bytes", used)

    def now(self, waiting: int, buffer_bytes: int) -> PublisherStats:
        with self._lock:
            return PublisherStats(**self._counts, waiting=waiting, buffer_bytes=buffer_bytes)
