"""Time as an argument: a clock port, the system's clock and one that a test moves."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: `monotonic` for durations, `now_ms` for what people and the log call the time."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start; never goes back."""
        ...

    def now_ms(self) -> int:
        """Unix milliseconds."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


class ManualClock:
    """A clock that stands still until `advance`; thread-safe."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._lock = threading.Lock()
        self._start_ms = now_ms
        self._elapsed = 0.0

    def monotonic(self) -> float:
        with self._lock:
            return self._elapsed

    def now_ms(self) -> int:
        with self._lock:
            return self._start_ms + int(self._elapsed * 1000)

    def advance(self, seconds: float) -> None:
        """Moves both readings forward by `seconds` >= 0."""
        with self._lock:
            self._elapsed += seconds
