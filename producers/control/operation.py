"""The handle of one command on its way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from moebus.broker.ports import Position
from moebus.observability.clock import Clock
from moebus.observability.log import get_logger
from moebus.producers.control.answers import Answers
from moebus.producers.control.follower import Follower
from moebus.producers.control.outcome import Outcome, outcome_of
from moebus.producers.control.update import choose
from moebus.schemas.control import DEFAULT_DEADLINE_S
from moebus.schemas.control_args import Method, Verdict
from moebus.schemas.responses import ControlResponse

GRACE_SECONDS = 1.0
"""How long after a command's deadline its answers are still waited for: a worker says `timeout` at the deadline."""
VOID_SECONDS = 3.0
"""How long giving up waits for the acknowledgement of its `void`; it is sent also after that."""
_SLICE_SECONDS = 0.2
_log = get_logger(__name__)

Progress = Callable[[ControlResponse], None]


class Decider(Protocol):
    """Appends a decision to the command log."""

    def __call__(self, request_id: str, verdict: Verdict, reason: str, patience: float = ...) -> bool:
        """False where it was not acknowledged in `patience` seconds; the first decision in the log counts."""
        ...


class Operation:
    """A command that is in the log. `wait` from one thread at a time; the rest is thread-safe."""

    def __init__(self, answers: Answers, follower: Follower, clock: Clock, decide: Decider, min_ok: int | None) -> None:
        self._answers = answers
        self._follower = follower
        self._clock = clock
        self._decide = decide
        self._min_ok = min_ok
        self._started = clock.monotonic()
        self._shown = 0
        self._decided = False

    @property
    def request_id(self) -> str:
        return self._answers.request.request_id

    @property
    def position(self) -> Position:
        """Where the command lies in the log."""
        assert self._answers.position is not None
        return self._answers.position

    @property
    def seconds(self) -> float:
        """Seconds since the acknowledgement."""
        return self._clock.monotonic() - self._started

    def outcome(self) -> Outcome:
        """The outcome as the answers stand; waits for nothing."""
        with self._follower.changed:
            return outcome_of(self._answers, self._min_ok)

    def wait(self, timeout: float | None = None, progress: Progress | None = None) -> Outcome:
        """Waits until every expected worker (or `min_ok`) has answered, and returns the outcome.

        `timeout`: seconds from the acknowledgement; default: the command's deadline. Answers that a worker gives at its
        deadline are waited for `GRACE_SECONDS` more. Then `void` is appended, so that no later joiner repeats the
        command. An update is committed or voided on the way. `progress` sees every answer once, on this thread.
        """
        limit = self.limit(timeout)
        while True:
            outcome = self.turn(limit, progress)
            if outcome is not None:
                return outcome
            with self._follower.changed:
                if len(self._answers.events) == self._shown:
                    self._follower.wait_change(min(_SLICE_SECONDS, max(limit - self.seconds + GRACE_SECONDS, 0.001)))

    def limit(self, timeout: float | None) -> float:
        """Seconds from the acknowledgement that `wait(timeout)` waits for."""
        limit = self._answers.request.seconds if timeout is None else timeout
        return DEFAULT_DEADLINE_S if math.isinf(limit) else limit  # begin_run has no deadline; waiting for it has

    def turn(self, limit: float, progress: Progress | None) -> Outcome | None:
        """One step of `wait`: shows what is new, decides an update that can be decided, gives up when it is time.

        The outcome once it is final or given up, else None. It waits for the acknowledgement of a decision alone.
        """
        left = limit - self.seconds
        outcome = self.outcome()
        self._show(progress)  # after it: `progress` has seen every answer that the outcome counts
        update = self._answers.request.method is Method.UPDATE_WEIGHTS
        if update and not self._decided and outcome.decision is None and left > -GRACE_SECONDS:
            self._settle_update(late=left <= 0)
        elif outcome.complete and (outcome.decision is not None or not self._decided):
            self._follower.unwatch(self._answers)
            return outcome
        elif left <= -GRACE_SECONDS:
            outcome = self._give_up()
            self._show(progress)
            return outcome
        self._follower.check()
        return None

    @property
    def deciding(self) -> bool:
        """Whether this is an update whose decision is not in the log yet, as far as is known here."""
        return self._answers.request.method is Method.UPDATE_WEIGHTS and self._answers.decision is None

    def listen(self, listener: Callable[[], None]) -> None:
        """`listener` is called, on the reader's thread, whenever there may be something for `turn`."""
        self._follower.listen(self._answers, listener)

    def forget(self) -> None:
        """Answers are followed no longer. The command stays in the log."""
        self._follower.unwatch(self._answers)

    def _settle_update(self, late: bool) -> None:
        with self._follower.changed:
            choice = choose(self._answers, late)
        if choice is None:
            return
        # Without an acknowledgement it is tried again: another one in the log changes nothing.
        self._decided = self._decide(self.request_id, choice.verdict, choice.reason)

    def _give_up(self) -> Outcome:
        """Time is over. A decision in the log stands; otherwise nobody may begin this command any more."""
        outcome = self.outcome()
        if outcome.decision is None and not self._decided:
            missing = ", ".join(outcome.missing) or "anybody"
            self._decided = self._decide(self.request_id, "void", f"no answer in time from {missing}", VOID_SECONDS)
        self._follower.unwatch(self._answers)
        return self.outcome()

    def _show(self, progress: Progress | None) -> None:
        with self._follower.changed:
            new = self._answers.events[self._shown :]
            self._shown = len(self._answers.events)
        for placed in new if progress is not None else ():
            assert progress is not None
            progress(placed.response)
