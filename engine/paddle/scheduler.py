"""Continuous batching: one thread admits, prefills, decodes and ends requests, one step after the other."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any

import numpy as np
import numpy.typing as npt

from moebus.engine.admission import Admission
from moebus.engine.hooks import Hook
from moebus.engine.paddle.capture import RouteCapture
from moebus.engine.paddle.config import ModelConfig
from moebus.engine.paddle.lineup import Lineup
from moebus.engine.paddle.runner import Runner
from moebus.engine.paddle.sampling import sample
from moebus.engine.paddle.sequence import Sequence
from moebus.engine.paddle.tiers import CacheTiers
from moebus.engine.port import EngineFailed, FinishReason

_log = logging.getLogger(__name__)


class Scheduler:
    """`device_lock` is held during a step and by whoever touches weights, cache or pool otherwise; admission's lock
    only for moments. A step forwards one token of every sequence that decodes, then prompts, of which at most
    `prefill_chunk` tokens (0: no limit), so that a long prompt does not hold up the others."""

    def __init__(
        self,
        runner: Runner,
        tiers: CacheTiers[Any],
        capture: RouteCapture,
        admission: Admission,
        config: ModelConfig,
        hook: Hook,
    ) -> None:
        self.device_lock = Lock()
        self.usable: Callable[[], bool] = lambda: True
        self.lineup = Lineup(tiers, capture, admission.changed, config.max_batch)
        self._runner = runner
        self._tiers = tiers
        self._capture = capture
        self._admission = admission
        self._chunk = config.prefill_chunk or sys.maxsize
        self._hook = hook
        self.drafted = 0
        self.accepted = 0
        self._stepping = False
        self._thread = Thread(target=self._loop, name="moebus-paddle-engine", daemon=True)
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        self.lineup.submit(sequence)

    def still(self) -> bool:
        """No step runs. Ask with admission's lock held."""
        return not self._stepping

    @property
    def running(self) -> bool:
        """The thread has not ended."""
        return self._thread.is_alive()

    def join(self, timeout: float) -> None:
        """Waits for the thread, which ends once admission is shut down and every request has ended."""
        self._thread.join(timeout)

    def _loop(self) -> None:
        while self._next():
            try:
                self._end_aborted()
                if self._may_run():
                    self._hook("step", "", None)
                    self._step()
            except Exception as error:
                everyone = self.lineup.everyone()
                _log.exception("The engine's loop failed; %d requests end", len(everyone))
                self._fail(everyone, error)

    def _next(self) -> bool:
        changed = self._admission.changed
        with changed:
            self._stepping = False
            changed.notify_all()
            changed.wait_for(lambda: self._admission.down or self._any_aborted() or self._may_run())
            self._stepping = True
            return not (self._admission.down and not self.lineup.everyone())

    def _any_aborted(self) -> bool:
        return any(sequence.ticket.aborted for sequence in self.lineup.everyone())

    def _may_run(self) -> bool:
        busy = bool(self.lineup.running or self.lineup.waiting)
        return busy and not self._admission.frozen and self.usable()

    def _step(self) -> None:
        self._end_aborted()
        with self.device_lock:
            before = self.lineup.preemptions
            self._decode()
            left = self._prefill([one for one in self.lineup.running if one.pending > 1], self._chunk)
            crowded = self.lineup.preemptions > before  # who just gave up its blocks would take them back at once
            while left > 0 and not crowded and (new := self.lineup.admit()) is not None:
                if self._taken_over(new):
                    continue
                left = self._prefill([new], left)

    def _taken_over(self, sequence: Sequence) -> bool:
        """Whether nothing is left of it to prefill: another engine has done that. It may end at once."""
        if not sequence.untold:
            return False
        sequence.take_given(self._tiers)
        self._go_on(sequence, sequence.tell_last)
        return sequence.done.is_set() or sequence.pending <= 1

    def _decode(self) -> None:
        """One token of every sequence that needs no more to sample the next."""
        ready = [one for one in self.lineup.running if one.pending == 1]
        for sequence in ready:
            if sequence in self.lineup.running:  # an older one may have put it out
                self.lineup.make_room(sequence)
        batch = [one for one in ready if one in self.lineup.running]
        if batch:
            self._forward(batch, 1)

    def _prefill(self, sequences: list[Sequence], left: int) -> int:
        """Forwards up to `left` tokens of these, first ones first; how many may still be."""
        for sequence in sequences:
            count = min(sequence.pending, left)
            if count:
                self._forward([sequence], count)
                left -= count
        return left

    def _forward(self, batch: list[Sequence], count: int) -> None:
        """The next `count` tokens of each; what has none left is sampled from."""
        try:
            logits = self._runner.forward(batch, count)
        except Exception as error:  # whatever a kernel raises: these requests end, the engine and the others live on
            _log.exception("A step of %d requests failed", len(batch))
            for sequence in batch:
                self._end(sequence, error=_step_failed(error))
            return
        for sequence, row in zip(batch, logits, strict=True):
            self._advance(sequence, row)

    def _advance(self, sequence: Sequence, logits: npt.NDArray[np.float32]) -> None:
        if not np.isfinite(logits).all():
            self._end(sequence, error=EngineFailed("the model's logits are not finite; check the weights"))
            return
        sequence.register_full_blocks(self._tiers.pool)
        if sequence.pending:
            return
        if sequence.prompt.max_tokens:
            self._go_on(sequence, lambda: sequence.add(*sample(logits, sequence.prompt, sequence.sampled)))
        else:
            self._end(sequence, "length")

    def _go_on(self, sequence: Sequence, step: Callable[[], FinishReason | None]) -> None:
        """Takes a step that says why the sequence ends, if it does."""
        try:
            reason = step()
        except EngineFailed as error:
            self._end(sequence, error=error)
            return
        if reason is not None:
            self._end(sequence, reason)

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        with self.device_lock:
            for sequence in sequences:
                self._end(sequence, error=_step_failed(error))

    def _end_aborted(self) -> None:
        with self.device_lock:
            for sequence in self.lineup.everyone():
                if sequence.ticket.aborted:
                    self._end(sequence, "abort")

    def _end(self, sequence: Sequence, reason: FinishReason = "abort", error: Exception | None = None) -> None:
        """Gathers the routes, and only then gives the blocks back."""
        sequence.error = error
        if error is None:
            try:
                sequence.result = sequence.outcome(reason, self._capture)
                if sequence.at_end is not None and reason != "abort":
                    sequence.at_end(sequence)
            except EngineFailed as failure:
                sequence.error = failure
            except Exception as failure:  # of a device that is asked for what was computed
                sequence.error = _step_failed(failure)
        self.drafted += sequence.drafted
        self.accepted += sequence.accepted
        self.lineup.remove(sequence)
        self._admission.leave(sequence.ticket, aborted=reason == "abort")
        sequence.done.set()


def _step_failed(error: Exception) -> EngineFailed:
    # Paddle's errors carry a C++ trace before the cause
    text = str(error).strip().splitlines() or [type(error).__name__]
    return EngineFailed(f"a step of this request failed ({text[-1].strip()}); send it again")
