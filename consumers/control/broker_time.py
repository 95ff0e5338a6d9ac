"""The broker's clock as a process knows it, and deadlines by it."""

from __future__ import annotations

import math
import threading

from moebus.observability.clock import Clock


class BrokerClock:
    """Unix milliseconds by the broker: the append time of the last acknowledged record plus the time since its ack.

    Before the first ack it is the machine's own clock. Thread-safe.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._base_ms: float | None = None

    def observe(self, timestamp_ms: int) -> None:
        """Takes in the append time of a record of ours whose ack has just come."""
        with self._lock:
            self._base_ms = timestamp_ms - self._clock.monotonic() * 1000

    def now_ms(self) -> int:
        with self._lock:
            base = self._base_ms
        return self._clock.now_ms() if base is None else int(base + self._clock.monotonic() * 1000)


class Until:
    """A Deadline at a broker time; None = never."""

    def __init__(self, clock: BrokerClock, at_ms: int | None) -> None:
        self._clock = clock
        self._at_ms = at_ms

    def remaining(self) -> float:
        return math.inf if self._at_ms is None else (self._at_ms - self._clock.now_ms()) / 1000
