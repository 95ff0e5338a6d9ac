"""How far a store is: written by its threads, read by everybody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count

from moebus.observability.clock import Clock
from moebus.schemas.rollout import RolloutKey

SILENCE_SECONDS = 10.0
Listener = Callable[[int, "RolloutKey | None"], None]


@dataclass(frozen=True, slots=True)
class Lag:
    """Of one partition. `goal`: log end when the store began to follow it; `end`: as last heard; `applied`: next
    offset, durable. `full`: why it takes nothing in, None while it does. `asked_ms`: the broker's time before `end`
    was asked for, 0 where not known."""

    goal: int
    end: int
    applied: int
    full: str | None = None
    asked_ms: int = 0


class Progress:
    """Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._lags: dict[int, Lag] = {}
        self._heard = clock.monotonic()
        self._waiting: str | None = "the store is starting"
        self._listeners: dict[int, Listener] = {}
        self._numbers = count()

    def listen(self, changed: Listener) -> Callable[[], None]:
        """`changed(number, key)` is called after every commit with its partition and None, and before it with a rollout
        that became readable; on the thread that writes, and it must be quick. The result ends that."""
        with self._lock:
            number = next(self._numbers)
            self._listeners[number] = changed
        return lambda: self._forget(number)

    def _forget(self, number: int) -> None:
        with self._lock:
            del self._listeners[number]

    def readable(self, number: int, key: RolloutKey) -> None:
        """A rollout can be read, before its commit."""
        self._tell(number, key)

    def _tell(self, number: int, key: RolloutKey | None = None) -> None:
        with self._lock:
            listeners = list(self._listeners.values())
        for changed in listeners:
            changed(number, key)

    def wait_for(self, reason: str | None) -> None:
        """Why nothing is followed yet; None once all is."""
        with self._lock:
            self._waiting = reason

    def follow(self, number: int, goal: int, applied: int) -> None:
        """Begins, or begins again, with a partition."""
        with self._lock:
            self._lags[number] = Lag(goal, goal, applied)
        self._tell(number)

    def advance(self, number: int, applied: int) -> None:
        """After a commit."""
        with self._lock:
            self._lags[number] = replace(self._lags[number], applied=applied)
        self._tell(number)

    def full(self, number: int, reason: str | None) -> None:
        with self._lock:
            self._lags[number] = replace(self._lags[number], full=reason)

    def heard(self, ends: Mapping[int, int], asked_ms: int = 0) -> None:
        """The brokers answered with these log ends, asked for at `asked_ms` of their time."""
        with self._lock:
            self._heard = self._clock.monotonic()
            for number, end in ends.items():
                if number in self._lags:
                    self._lags[number] = replace(self._lags[number], end=end, asked_ms=asked_ms)

    def time_at_end(self, number: int) -> int:
        """A time (ms, the broker's) that no record to come is older than; 0 where none is known."""
        with self._lock:
            lag = self._lags.get(number)
            return lag.asked_ms if lag is not None and lag.applied >= max(lag.end, lag.goal) else 0

    def lags(self) -> dict[int, Lag]:
        with self._lock:
            return dict(self._lags)

    def unready(self, number: int | None = None) -> str | None:
        """Why reads of a partition (None: of all) cannot be answered now; None where they can."""
        with self._lock:
            if self._waiting is not None:
                return self._waiting
            silent = self._clock.monotonic() - self._heard
            if silent > SILENCE_SECONDS:
                return f"nothing was heard from Kafka for {silent:.0f} s"
            chosen = self._lags if number is None else {number: self._lags[number]}
            behind = {n: lag for n, lag in chosen.items() if lag.applied < lag.goal}
        if not behind:
            return None
        done = ", ".join(f"partition {n} at {lag.applied} of {lag.goal}" for n, lag in sorted(behind.items()))
        return f"still reading the log: {done}"
