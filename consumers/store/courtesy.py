"""Work that can wait lets those who read go first.

CPython's lock goes to whoever is there first. A thread that gives it away and takes it back within every call of LMDB
wins nearly always against one that has to be woken, and is asked to let go only where the other one has waited for a
whole switch interval without being woken in vain: beside a removal, answers stood still for milliseconds. Only sleep
hands the lock over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WORK = 0.00025
REST = 0.0001
LOOK = 0.0003
MOST = 0.02
"""Seconds: of work without a rest; of a rest; between two looks at who still waits for an answer; of rests in one turn
after which it looks no more, so that records are read and committed under any load."""


def press_on() -> None:
    """For work that cannot wait."""


class Courtesy:
    """`answering` belongs to the thread of an event loop, the rest to the one that can wait."""

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.rested = 0.0
        """Seconds so far."""
        self._now = now
        self._sleep = sleep
        self._answers = 0
        self._since = now()
        self._patient_until = 0.0

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Somebody waits for what is done inside."""
        self._answers += 1
        try:
            yield
        finally:
            self._answers -= 1

    def begin(self) -> None:
        """A turn of work, after which other work is due."""
        self._since = self._now()
        self._patient_until = self.rested + MOST

    def give_way(self) -> None:
        """Between two pieces of it: rests where it is time, and then until nobody waits."""
        if self._now() - self._since < WORK:
            return
        self._rest(REST)
        while self._answers and self.rested < self._patient_until:
            self._rest(LOOK)
        self._since = self._now()

    def _rest(self, seconds: float) -> None:
        began = self._now()
        self._sleep(seconds)
        self.rested += self._now() - began
