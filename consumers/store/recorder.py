"""The store's metrics."""

from __future__ import annotations

from moebus.broker.ports import LogRecord
from moebus.consumers.store.figures import Batch, Figures
from moebus.consumers.store.ingest import Outcome
from moebus.consumers.store.progress import Lag
from moebus.observability.clock import Clock
from moebus.observability.log import get_logger
from moebus.observability.metrics import Metrics

_log = get_logger(__name__)
_SAY_EVERY = 60.0


class Recorder:
    """The follower's thread counts, the watcher's thread sets lags."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._metrics = metrics
        self._clock = clock
        self._figures: dict[int, Figures] = {}
        self._said: dict[str, float] = {}

    def record(self, record: LogRecord, outcome: Outcome, *, again: bool = False) -> None:
        """`again`: it made a complete attempt whole beside another of the same identity."""
        self._metrics.inc("moebus_store_records_total", kind=outcome.kind, outcome=outcome.verdict)
        self._metrics.inc("moebus_store_bytes_total", len(record.value or b""))
        if outcome.readable:
            self._readable(max(0, record.timestamp_ms))
        if outcome.over_quota is not None:
            self._say_quota(outcome.over_quota)
        if again:
            self._metrics.inc("moebus_store_repeated_rollouts_total")
        if outcome.dead:
            self._metrics.inc("moebus_dead_letters_total", reason=outcome.reason)

    def _say_quota(self, run: str) -> None:
        """Each rollout is counted and tells its reader; the log has a line a minute and run."""
        now = self._clock.monotonic()
        if now - self._said.get(run, float("-inf")) >= _SAY_EVERY:
            self._said = {one: at for one, at in self._said.items() if now - at < _SAY_EVERY} | {run: now}
            _log.warning("store.quota", f"run {run} is at its quota: its oldest rollouts go for later ones", run=run)

    def committed(self, number: int, batch: Batch, figures: Figures, seconds: float) -> None:
        self._metrics.observe("moebus_store_commit_duration_seconds", seconds)
        for appended_ms in batch.now_readable:
            self._readable(appended_ms)
        for cause, count in batch.removed.items():
            self._metrics.inc("moebus_store_deleted_rollouts_total", count, cause=cause)
        self.sizes(number, figures)

    def _readable(self, appended_ms: int) -> None:
        delay_ms = max(0, self._clock.now_ms() - appended_ms)
        self._metrics.observe("moebus_store_readable_delay_seconds", delay_ms / 1000)

    def sizes(self, number: int, figures: Figures) -> None:
        self._figures[number] = figures
        held = list(self._figures.values())
        self._metrics.set("moebus_store_rollouts", sum(one.whole for one in held))
        self._metrics.set("moebus_store_used_bytes", sum(one.used_bytes for one in held))

    def stopped(self, number: int, is_full: bool) -> None:
        self._metrics.set("moebus_store_ingest_stopped", int(is_full), partition=str(number))

    def lags(self, lags: dict[int, Lag]) -> None:
        for number, lag in lags.items():
            self._metrics.set("moebus_store_lag_records", max(0, lag.end - lag.applied), partition=str(number))
