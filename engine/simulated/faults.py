"""Faults a test plants in a simulated engine."""

from __future__ import annotations

from collections import defaultdict, deque
from threading import Lock

from moebus.schemas.errors import MoebusError


class Faults:
    """Planned failures by method name, each used once, in order."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._planned: defaultdict[str, deque[MoebusError]] = defaultdict(deque)

    def plan(self, method: str, error: MoebusError, times: int) -> None:
        with self._lock:
            self._planned[method].extend([error] * times)

    def take(self, method: str) -> MoebusError | None:
        """The next planned failure of `method`, if there is one."""
        with self._lock:
            return self._planned[method].popleft() if self._planned[method] else None
