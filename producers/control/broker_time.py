"""The broker's time, as far as a process can know it from append times."""

from __future__ import annotations

import threading

from moebus.observability.clock import Clock


class BrokerTime:
    """Estimates the broker's clock from records: never ahead of it, late by at most the fastest delivery seen.

    A sender's wall clock decides nothing (design section 2); only durations of the local monotonic clock are used.
    Thread-safe.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._offset_ms: float | None = None

    def observe(self, timestamp_ms: int) -> None:
        """Learns from a record that exists now and was appended at `timestamp_ms` (Unix milliseconds)."""
        offset = timestamp_ms - self._clock.monotonic() * 1000
        with self._lock:
            if self._offset_ms is None or offset > self._offset_ms:
                self._offset_ms = offset

    def now_ms(self) -> int:
        """Unix milliseconds by the broker; the local wall clock while no record was ever seen."""
        with self._lock:
            offset = self._offset_ms
        if offset is None:
            return self._clock.now_ms()
        return int(offset + self._clock.monotonic() * 1000)
