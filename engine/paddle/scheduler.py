"""Continuous batching: one thread admits, prefills, decodes and ends requests, one step after the other."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from threading import Lock, Thread
from typing import Any

import numpy as np
import numpy.typing as npt

from moebus.engine.admission import Admission
from moebus.engine.hooks import Hook
from moebus.engine.paddle.capture import RouteCapture
from moebus.engine.paddle.runner import Runner
from moebus.engine.paddle.sampling import sample
from moebus.engine.paddle.sequence import Sequence
from moebus.engine.paddle.tiers import CacheTiers
from moebus.engine.port import EngineFailed, FinishReason
from moebus.engine.prompts import route_rows

_log = logging.getLogger(__name__)


class Scheduler:
    """`device_lock` is held during a step and by whoever touches weights, cache or pool otherwise; admission's lock
    only for moments. Requests wait, first come first served, until there are blocks for all they may need."""

    def __init__(
        self,
        runner: Runner,
        tiers: CacheTiers[Any],
        capture: RouteCapture,
        admission: Admission,
        max_batch: int,
        hook: Hook,
    ) -> None:
        self.device_lock = Lock()
        self.usable: Callable[[], bool] = lambda: True
        self._runner = runner
        self._tiers = tiers
        self._pool = tiers.pool
        self._capture = capture
        self._admission = admission
        self._max_batch = max_batch
        self._hook = hook
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._stepping = False
        self._thread = Thread(target=self._loop, name="moebus-paddle-engine", daemon=True)
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        with self._admission.changed:
            self._waiting.append(sequence)
            self._admission.changed.notify_all()

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
                _log.exception("The engine's loop failed; %d requests end", len(self._all()))
                self._fail(self._all(), error)

    def _next(self) -> bool:
        changed = self._admission.changed
        with changed:
            self._stepping = False
            changed.notify_all()
            changed.wait_for(lambda: self._admission.down or self._any_aborted() or self._may_run())
            self._stepping = True
            return not (self._admission.down and not self._all())

    def _all(self) -> list[Sequence]:
        with self._admission.changed:
            return [*self._running, *self._waiting]

    def _any_aborted(self) -> bool:
        return any(sequence.ticket.aborted for sequence in self._all())

    def _may_run(self) -> bool:
        return bool(self._running or self._waiting) and not self._admission.frozen and self.usable()

    def _step(self) -> None:
        """One token for every running sequence, after that the first one of newly admitted ones."""
        self._end_aborted()
        with self.device_lock:
            decoding = list(self._running)
            if decoding:
                self._forward(decoding)
            while (sequence := self._admit()) is not None:
                self._forward([sequence])

    def _admit(self) -> Sequence | None:
        with self._admission.changed:
            if not self._waiting or len(self._running) >= self._max_batch:
                return None
            sequence = self._waiting[0]
            if sequence.ticket.aborted or not sequence.start(self._tiers):
                return None
            self._waiting.popleft()
            self._running.append(sequence)
            return sequence

    def _forward(self, batch: list[Sequence]) -> None:
        try:
            logits = self._runner.forward(batch)
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
        sequence.register_full_blocks(self._pool)
        reason: FinishReason | None = "length"
        if sequence.prompt.max_tokens:
            reason = sequence.add(*sample(logits, sequence.prompt, sequence.sampled))
        if reason is not None:
            self._end(sequence, reason)

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        with self.device_lock:
            for sequence in sequences:
                self._end(sequence, error=_step_failed(error))

    def _end_aborted(self) -> None:
        with self.device_lock:
            for sequence in self._all():
                if sequence.ticket.aborted:
                    self._end(sequence, "abort")

    def _end(self, sequence: Sequence, reason: FinishReason = "abort", error: Exception | None = None) -> None:
        """Gathers the routes, and only then gives the blocks back."""
        if error is None:
            try:
                self._conclude(sequence, reason)
            except EngineFailed as failure:
                sequence.error = failure
        else:
            sequence.error = error
        sequence.release(self._pool)
        with self._admission.changed:
            if sequence in self._running:
                self._running.remove(sequence)
            else:
                self._waiting.remove(sequence)
        self._admission.leave(sequence.ticket, aborted=reason == "abort")
        sequence.done.set()

    def _conclude(self, sequence: Sequence, reason: FinishReason) -> None:
        rows = route_rows(sequence.prompt_tokens, sequence.sampled, prefilled=sequence.prefilled)
        routes, versions = self._capture.gather(sequence.blocks, sequence.generations, rows)
        kept = routes if sequence.prompt.capture_routes else None
        sequence.result = sequence.outcome(reason, kept, versions)


def _step_failed(error: Exception) -> EngineFailed:
    text = str(error).strip().splitlines() or [
        type(error).__name__
    ]  # Paddle's errors carry a C++ trace before the cause
    return EngineFailed(f"a step of this request failed ({text[-1].strip()}); send it again")
