"""What goes on between commands: heartbeats, watching the engines, gauges, and voids of updates nobody decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moebus.consumers.control.executor import Executor
from moebus.consumers.control.worker import Shared, Worker
from moebus.observability.clock import Clock
from moebus.observability.log import get_logger
from moebus.schemas.control import make_request
from moebus.schemas.control_args import Method
from moebus.schemas.responses import Lifecycle
from moebus.schemas.tags import ALL_TAGS

VOID_SPREAD_MS = 5000
VOID_AGAIN_S = 150.0
_log = get_logger(__name__)


@dataclass(slots=True)
class Seat:
    """A worker with its thread. `hello`: offset of its own. `taken`: the take-over was handed to the thread.

    `voided`: the update this seat has written a void for, and when. `patience_ms`: how long after its deadline.
    """

    worker: Worker
    executor: Executor
    hello: int = -1
    taken: bool = False
    voided: tuple[int, float] = (-1, 0.0)
    patience_ms: int = 0


class Upkeep:
    """Used by the host's thread."""

    def __init__(self, seats: Sequence[Seat], shared: Shared, clock: Clock, heartbeat: float) -> None:
        self._seats = seats
        self._shared = shared
        self._clock = clock
        self._heartbeat = heartbeat
        self._due = clock.monotonic()

    def beat(self, position: int | None) -> None:
        """Heartbeats of all workers, once per interval. `position`: next command of the log, which an idle worker has
        dealt with; None while the process leaves."""
        now = self._clock.monotonic()
        if now < self._due:
            self._look_for_the_lost()
            return
        self._due = now + self._heartbeat
        for seat in self._seats:
            if seat.taken and seat.worker.taken_over.is_set():
                self._beat(seat, position)
        self._gauges()

    def _look_for_the_lost(self) -> None:
        """An engine that does not answer is looked for at every turn: it may come back open, with old weights."""
        for seat in self._seats:
            if seat.worker.spec.trouble() is not None and seat.worker.taken_over.is_set():
                self._check(seat)

    def _check(self, seat: Seat) -> None:
        if not seat.worker.keeper.check():
            seat.executor.put(lambda: None)  # wakes the thread, which restores the engine first

    def _beat(self, seat: Seat, position: int | None) -> None:
        worker = seat.worker
        self._check(seat)
        if position is not None and seat.executor.idle:
            worker.reporter.applied = max(worker.reporter.applied, position)
        if worker.reporter.beat():
            self._shared.metrics.inc("moebus_worker_heartbeats_total")
        if worker.lies_open() and seat.executor.idle:
            seat.executor.put(worker.close_again)

    def _gauges(self) -> None:
        reporters = [seat.worker.reporter for seat in self._seats]
        metrics = self._shared.metrics
        lifecycles = [reporter.view().lifecycle for reporter in reporters]
        for lifecycle in Lifecycle:
            metrics.set("moebus_worker_lifecycle", lifecycles.count(lifecycle), lifecycle=str(lifecycle))
        for tag in ALL_TAGS:
            held = sum(r.found.bytes_by_tag.get(tag, 0) for r in reporters if r.found is not None)
            metrics.set("moebus_worker_tag_bytes", held, tag=str(tag))
        metrics.set("moebus_worker_applied_offset", min(reporter.applied for reporter in reporters))

    def void_overdue(self) -> None:
        """Ends an update that nobody decides: every target of it may, after its deadline."""
        for seat in self._seats:
            worker = seat.worker
            update = worker.void_due(self._shared.clock.now_ms(), seat.patience_ms)
            now = self._clock.monotonic()
            if update is None or (seat.voided[0] == update.offset and now < seat.voided[1] + VOID_AGAIN_S):
                continue
            seat.voided = (update.offset, now)
            request_id = f"void-{worker.spec.worker_id}-{worker.reporter.boot_id}-{update.offset}"
            args = {"request_id": update.request_id, "decision": "void"}
            request = make_request(request_id, Method.DECIDE, args, issuer=worker.spec.worker_id)
            self._shared.journal.append(self._shared.journal.request(request))
            _log.warning("control.voided", "no decision by the deadline", request_id=update.request_id)
