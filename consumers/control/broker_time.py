"""The broker's clock as a process knows it, and deadlines by it."""

from __future__ import annotations

import math
import threading

from moebus.observability.clock import Clock

STALE_S = 10.0


class BrokerClock:
    """Unix milliseconds by the broker: the append time of the last acknowledged record plus the time since its ack.

    An ack that took long says less than a quick one and counts only where that is old. Before the first ack it is the
    machine's own clock. Thread-safe.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._base_ms: float | None = None
        self._taken_at = 0.0
        self._heard_at = clock.monotonic()

    def observe(self, timestamp_ms: int) -> None:
        """Takes in the append time of a record of ours whose ack has just come."""
        now = self._clock.monotonic()
        base = timestamp_ms - now * 1000
        with self._lock:
            self._heard_at = now
            if self._base_ms is None or base > self._base_ms or now - self._taken_at > STALE_S:
                self._base_ms, self._taken_at = base, now

    def now_ms(self) -> int:
        with self._lock:
            base = self._base_ms
        return self._clock.now_ms() if base is None else int(base + self._clock.monotonic() * 1000)

    def silence(self) -> float:
        """Seconds since the last ack, or since the start."""
        with self._lock:
            return self._clock.monotonic() - self._heard_at


class Until:
    """A Deadline at a broker time; None = never."""

    def __init__(self, clock: BrokerClock, at_ms: int | None) -> None:
        self._clock = clock
        self._at_ms = at_ms

    def remaining(self) -> float:
        return math.inf if self._at_ms is None else (self._at_ms - self._clock.now_ms()) / 1000
