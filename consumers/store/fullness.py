"""Partitions that take nothing in because the map or the disk is full: when to try again, and when to say so.

Pure: time is passed in. Two ways to be full need two ways back. Where the fill level stopped it, it goes on below a
lower one. Where a batch was lost although the level said that it fits (pages scattered, others on the same disk), it
goes on once the fill has changed, or else on trial after a growing while; it counts as full until a batch went through.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

RESUME_BELOW = 0.9
FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0
SAY_EVERY = 60.0
"""Seconds: a partition that fills up again and again is said to be full once in so long."""


@dataclass(frozen=True, slots=True)
class Stop:
    """A partition that stands still: since when, at which offset, how full it was, how long to wait before a trial (0:
    none is needed)."""

    at: float
    offset: int
    used: int
    room: int
    wait: float


@dataclass(slots=True)
class Stops:
    """All of one store. `standing`: those that take nothing in."""

    standing: dict[int, Stop] = field(default_factory=dict)
    _trials: dict[int, Stop] = field(default_factory=dict)
    _said: dict[int, float] = field(default_factory=dict)
    _unanswered: set[int] = field(default_factory=set)

    def stop(self, number: int, offset: int, used: int, room: int, *, lost: bool, now: float) -> bool:
        """It is full before `offset`; `lost`: found out by losing a batch. Returns whether to say so."""
        standing, trial = self.standing.get(number), self._trials.pop(number, None)
        if standing is not None:  # it could not even tidy up
            self.standing[number] = replace(standing, wait=max(standing.wait, FIRST_WAIT if lost else 0.0))
            return False
        wait = 0.0
        if lost:
            wait = FIRST_WAIT if trial is None else min(LONGEST_WAIT, 2 * trial.wait)
        self.standing[number] = Stop(now, offset, used, room, wait)
        if trial is not None or now - self._said.get(number, float("-inf")) < SAY_EVERY:
            return False
        self._said[number] = now
        self._unanswered.add(number)
        return True

    def may_resume(self, number: int, used: int, room: int, now: float) -> bool:
        """Whether a partition that stands still may go on, at this fill level."""
        stop = self.standing[number]
        if used >= RESUME_BELOW * room:
            return False
        changed = used <= RESUME_BELOW * stop.used or room >= stop.room / RESUME_BELOW
        return not stop.wait or changed or now - stop.at >= stop.wait

    def resume(self, number: int) -> bool:
        """It goes on. Returns whether that is sure; else it is on trial until `passed`."""
        stop = self.standing.pop(number)
        if stop.wait:
            self._trials[number] = stop
            return False
        return True

    def passed(self, number: int, offset: int) -> bool:
        """A batch of it up to `offset` went through. Returns whether that ended a trial."""
        trial = self._trials.get(number)
        if trial is None or offset <= trial.offset:
            return False
        del self._trials[number]
        return True

    def say_resumed(self, number: int) -> bool:
        """Whether to say that it goes on: once for each time that it was said to be full."""
        known = number in self._unanswered
        self._unanswered.discard(number)
        return known

    def forget(self, number: int) -> None:
        """It begins anew, empty."""
        self.standing.pop(number, None)
        self._trials.pop(number, None)
