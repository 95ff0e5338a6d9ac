"""The byte bound of the publisher: what is taken in and not yet settled may not exceed it."""

from __future__ import annotations

import threading

from moebus.observability.clock import Clock


class ByteBudget:
    """Counts bytes in and out. Thread-safe; waiting is first come, first served only as far as threads are."""

    def __init__(self, limit: int, clock: Clock) -> None:
        self.limit = limit
        self._clock = clock
        self._used = 0
        self._closed = False
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Bytes taken and not yet given back."""
        with self._changed:
            return self._used

    def take(self, size: int, wait: float) -> bool:
        """Takes `size` bytes; waits up to `wait` seconds for room. False: no room in time, or closed."""
        deadline = self._clock.monotonic() + wait
        with self._changed:
            while self._used + size > self.limit and not self._closed:
                left = deadline - self._clock.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
            if self._closed:
                return False
            self._used += size
            return True

    def give(self, size: int) -> None:
        """Gives `size` bytes back."""
        with self._changed:
            self._used -= size
            self._changed.notify_all()

    def close(self) -> None:
        """Every waiting and later `take` returns False."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
