"""A hook that can hold an engine at a named point until the test lets it go."""

from __future__ import annotations

from threading import Condition

from moebus.engine.port import Deadline
from tests.support.wait import wait_until


class Gate:
    """As an engine's `hook`: lets everything pass until `close_after(point, n)`; then holds the call after n."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._left: dict[str, int] = {}
        self._passes = 0
        self.held = 0
        self.calls: list[tuple[str, str]] = []

    def __call__(self, point: str, subject: str, deadline: Deadline | None) -> None:
        with self._changed:
            self.calls.append((point, subject))
            if point not in self._left:
                return
            self._left[point] -= 1
            if self._left[point] >= 0:
                return
            self.held += 1
            self._changed.wait_for(lambda: point not in self._left or self._passes, timeout=60)
            self._passes = max(self._passes - 1, 0)
            self.held -= 1

    def close_after(self, point: str, calls: int) -> None:
        """`calls` more calls of `point` pass, the next one is held."""
        with self._changed:
            self._left[point] = calls

    def wait_held(self) -> None:
        """Until a call is held."""
        wait_until(lambda: self.held, what="a call held at the gate")

    def step(self) -> None:
        """Lets the call that is held pass, and waits until the next one is held."""
        with self._changed:
            before = len(self.calls)
            self._passes += 1
            self._changed.notify_all()
        wait_until(lambda: len(self.calls) > before and self.held, what="the next call held at the gate")

    def open(self) -> None:
        with self._changed:
            self._left.clear()
            self._changed.notify_all()
