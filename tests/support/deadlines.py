"""Deadlines for tests."""

from __future__ import annotations

import time


class Left:
    """`seconds` from now on the monotonic clock."""

    def __init__(self, seconds: float = 30.0) -> None:
        self._end = time.monotonic() + seconds

    def remaining(self) -> float:
        return self._end - time.monotonic()


class Polls:
    """Passes after it was asked `polls` times: a deadline in the middle of an operation, without a clock."""

    def __init__(self, polls: int) -> None:
        self._polls = polls

    def remaining(self) -> float:
        self._polls -= 1
        return 1.0 if self._polls >= 0 else 0.0


class Always:
    """`seconds` whenever it is asked: a call gets so long, and what was before it took no time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def remaining(self) -> float:
        return self._seconds
