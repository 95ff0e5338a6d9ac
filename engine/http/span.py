"""Deadlines of an adapter's own, for calls that come without one."""

from __future__ import annotations

import time

from moebus.engine.port import Deadline


class Span:
    """Passes `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def remaining(self) -> float:
        return self._until - time.monotonic()


class Least:
    """`deadline`, but never less than `seconds` from now: for what has to be tidied up after it."""

    def __init__(self, deadline: Deadline, seconds: float) -> None:
        self._deadline = deadline
        self._span = Span(seconds)

    def remaining(self) -> float:
        return max(self._deadline.remaining(), self._span.remaining())
