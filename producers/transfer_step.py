"""One blocking step of a weight transfer, taken on both sides at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from moebus.observability.log import get_logger
from moebus.producers.control.errors import FleetError, fleet_error
from moebus.producers.control.operation import Operation
from moebus.producers.control.outcome import Outcome
from moebus.schemas.control_args import Method
from moebus.schemas.responses import ControlResponse, Phase

if TYPE_CHECKING:
    from moebus.producers.control.client import ControlClient
    from moebus.producers.control.commands import TargetLike

Abort = Callable[[str], object]
_SLICE_SECONDS = 0.2
_log = get_logger(__name__)


class TransferBroken(FleetError):
    """A step did not end well on every worker; `outcome` is of the command that says most, `reason` what came first."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(outcome)
        self.reason = reason
        sentence = outcome.sentence()
        self.args = (sentence if reason in sentence else f"{reason}; {sentence}",)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.outcome, self.reason))


class TransferStep:
    """`with` it: the command is in the log when the body begins, the body runs the trainer's part of the collective,
    and the end of the body collects what the workers answered.

    Whoever fails first ends the other. A worker's failure, a worker that is missing at the deadline or a body that
    raises calls `abort(reason)` once, from any thread: it must make a collective that waits give up, as closing an NCCL
    communicator does on all of its ranks. What the workers then still have to say is waited for `grace` seconds.
    """

    def __init__(
        self,
        control: ControlClient,
        calls: Sequence[tuple[TargetLike, Mapping[str, Any]]],
        *,
        timeout: float,
        grace: float,
        abort: Abort | None,
    ) -> None:
        """`calls`: (target, arguments) of each command; all of them are in the log before the body begins."""
        self._control = control
        self._calls = calls
        self._limit = timeout
        self._timeout = timeout
        self._grace = grace
        self._abort = abort
        self._operations: list[Operation] = []
        self._outcomes: list[Outcome] = []
        self._changed = threading.Event()
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._failure: BaseException | None = None
        self._watcher: threading.Thread | None = None

    @property
    def reason(self) -> str | None:
        """Why the step is over before its time: a body that takes long may look. None while all is well."""
        return self._reason

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Of the commands, once the block has ended."""
        return tuple(self._outcomes)

    def remaining(self) -> float:
        """Seconds until the deadline of the commands."""
        return self._timeout - (self._operations[0].seconds if self._operations else 0.0)

    def __enter__(self) -> TransferStep:
        """Appends the commands.

        Raises:
            InvalidInput: the info is no JSON or too large.  BrokerUnavailable.  FleetError: nobody matches the target.
                Nothing is left to be begun then.
        """
        if self._operations:
            raise RuntimeError("a step of a transfer is taken once; ask the client for another one")
        try:
            for target, args in self._calls:
                self._operations.append(
                    self._control.submit(Method.TRANSFER_WEIGHTS, args, target=target, deadline_s=self._timeout)
                )
                self._operations[-1].listen(self._changed.set)
                outcome = self._operations[-1].outcome()
                if outcome.status == "no_targets":
                    raise fleet_error(outcome)
        except BaseException:
            self._limit = 0.0  # what is in the log already is voided
            self._watch()
            raise
        self._watcher = threading.Thread(target=self._watch, name="weight-transfer", daemon=True)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._watcher is not None
        ours = exc is not None and self._end(f"the trainer failed: {type(exc).__name__}: {exc}")
        self._watcher.join()
        if ours:
            for outcome in self._outcomes:
                _log.warning("transfer.trainer_failed", outcome.sentence(), request_id=outcome.request_id)
            return
        if self._failure is not None:
            raise self._failure from exc
        bad = self._bad()
        if bad is not None:
            raise bad from exc

    def _bad(self) -> FleetError | None:
        """Of the outcome that says most: a worker that failed is more of a reason than one that is missing."""
        bad = sorted((one for one in self._outcomes if not one.ok), key=lambda one: bool(one.missing))
        return TransferBroken(bad[0], self._reason or "") if bad else None

    # -- the watcher's thread

    def _watch(self) -> None:
        left = list(self._operations)
        try:
            while left:
                self._changed.clear()
                left = [one for one in left if not self._turned(one)]
                if left:
                    self._changed.wait(_SLICE_SECONDS)
        except BaseException as error:
            self._failure = error
            self._end(f"the answers cannot be read: {error}")

    def _turned(self, operation: Operation) -> bool:
        outcome = operation.turn(self._limit, self._saw)
        if outcome is None:
            return False
        self._outcomes.append(outcome)
        if not outcome.ok:
            self._end(outcome.sentence())
        return True

    def _saw(self, answer: ControlResponse) -> None:
        if answer.phase is Phase.DONE and not answer.code.good:
            self._end(f"{answer.worker_id} answered {answer.code}: {answer.message}")

    def _end(self, reason: str) -> bool:
        """False where the step had been ended before."""
        with self._lock:
            if self._reason is not None:
                return False
            self._reason = reason
        if self._operations:
            self._limit = min(self._limit, self._operations[0].seconds + self._grace)
        if self._abort is not None:
            try:
                self._abort(reason)
            except Exception as error:  # the trainer's own; the step ends all the same
                _log.error("transfer.abort_failed", str(error), exc=error)
        self._changed.set()
        return True
