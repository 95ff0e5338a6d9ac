"""Who waits and who runs, and who has to give its blocks back when there are too few."""

from __future__ import annotations

from collections import deque
from threading import Condition
from typing import Any

from moebus.engine.paddle.capture import RouteCapture
from moebus.engine.paddle.sequence import Sequence
from moebus.engine.paddle.tiers import CacheTiers


class Lineup:
    """First come, first served. A sequence starts with blocks for the tokens it has and takes one more when it needs
    it; where none is left, the youngest one running gives up all of its own and is computed again later, ahead of
    those that wait. The oldest one thus always gets on.

    The lists change under `changed`; blocks under the engine's device lock, which the caller holds.
    """

    def __init__(self, tiers: CacheTiers[Any], capture: RouteCapture, changed: Condition, max_batch: int) -> None:
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.preemptions = 0
        self._tiers = tiers
        self._capture = capture
        self._changed = changed
        self._max_batch = max_batch

    def everyone(self) -> list[Sequence]:
        with self._changed:
            return [*self.running, *self.waiting]

    def submit(self, sequence: Sequence) -> None:
        with self._changed:
            self.waiting.append(sequence)
            self._changed.notify_all()

    def remove(self, sequence: Sequence) -> None:
        """It has ended; its blocks are free."""
        sequence.release(self._tiers.pool)
        with self._changed:
            if sequence in self.running:
                self.running.remove(sequence)
            else:
                self.waiting.remove(sequence)

    def admit(self) -> Sequence | None:
        """Starts the first one that waits, if there are blocks and a place for it.

        Blocks are taken without `changed`, as copying cached ones may last; only this thread ever takes one away.
        """
        with self._changed:
            if not self.waiting or len(self.running) >= self._max_batch:
                return None
            sequence = self.waiting[0]
        if sequence.ticket.aborted or not sequence.may_start or not sequence.start(self._tiers):
            return None
        if self._tiers.pool.available < len(self.running):  # each of them needs one soon: it would be put out again
            sequence.release(self._tiers.pool)
            return None
        with self._changed:
            self.waiting.popleft()
            self.running.append(sequence)
        return sequence

    def make_room(self, sequence: Sequence) -> bool:
        """Blocks for all tokens of a running sequence; False where it had to give up its own."""
        while not sequence.grow(self._tiers.pool):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def preempt(self, victim: Sequence) -> None:
        """Takes its blocks. What was captured stays with it: the rows that its tokens were sampled by."""
        victim.keep_rows(self._capture)
        victim.release(self._tiers.pool)
        with self._changed:
            self.running.remove(victim)
            self.waiting.appendleft(victim)
        self.preemptions += 1
