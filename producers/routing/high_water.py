"""Tells the user that the buffer fills, on a thread of its own: never on the one that submits."""

from __future__ import annotations

import threading
from collections.abc import Callable

from moebus.observability.log import get_logger

OnHighWater = Callable[[int, int], object]
"""(bytes that wait, bound)."""
_REARM = 0.75
_log = get_logger(__name__)


class HighWater:
    """Calls back once when `share` of `limit` is reached, and again after the use fell to 3/4 of that mark."""

    def __init__(self, limit: int, share: float, callback: OnHighWater) -> None:
        self._limit = limit
        self._mark = int(limit * share)
        self._callback = callback
        self._cond = threading.Condition()
        self._above = False
        self._due: int | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="moebus-high-water", daemon=True)
        self._thread.start()

    def note(self, used: int) -> None:
        """How many bytes wait now; returns at once."""
        with self._cond:
            if not self._above and used >= self._mark:
                self._above, self._due = True, used
                self._cond.notify()
            elif self._above and used <= self._mark * _REARM:
                self._above = False

    def close(self) -> None:
        """A call that is due is still made."""
        with self._cond:
            self._closed = True
            self._cond.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _run(self) -> None:
        while True:
            with self._cond:
                self._cond.wait_for(lambda: self._due is not None or self._closed)
                used, self._due = self._due, None
            if used is None:
                return
            try:
                self._callback(used, self._limit)
            except Exception as exc:
                _log.error("routes.high_water_failed", f"the high-water callback failed: {exc}", exc=exc)
