"""Waiting under a Deadline."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition

from moebus.engine.port import Deadline, EngineTimeout

_POLL_S = 0.05  # a Deadline may follow a clock of its own, so it is asked often


class Never:
    """The Deadline that never passes."""

    def remaining(self) -> float:
        return float("inf")


def check_deadline(deadline: Deadline, doing: str) -> None:
    """Raises EngineTimeout, naming what was being done, once the deadline has passed."""
    if deadline.remaining() <= 0:
        raise EngineTimeout(f"the deadline passed while {doing}; send the command again with more time")


def wait_on(condition: Condition, done: Callable[[], bool], deadline: Deadline) -> bool:
    """Waits, holding `condition`, until `done()` or the deadline; returns whether it is done."""
    while not done():
        left = deadline.remaining()
        if left <= 0:
            return False
        condition.wait(min(left, _POLL_S))
    return True
