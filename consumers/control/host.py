"""ControlWorkerHost: any number of workers on one reader and one writer (design section 3.1)."""

from __future__ import annotations

import random
import threading
import uuid
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from moebus.broker.errors import BrokerUnavailable, TopicMissing
from moebus.broker.ports import Broker, LogWriter
from moebus.broker.topics import Topics
from moebus.consumers.control.broker_time import BrokerClock
from moebus.consumers.control.executor import Executor
from moebus.consumers.control.feed import Feed
from moebus.consumers.control.identity import Standing
from moebus.consumers.control.journal import Journal, Stopped
from moebus.consumers.control.log_index import Entry, Kind, hello_of
from moebus.consumers.control.recovery import take_over
from moebus.consumers.control.reporter import WorkerSpec
from moebus.consumers.control.upkeep import VOID_SPREAD_MS, Seat, Upkeep
from moebus.consumers.control.worker import Fault, Shared, Worker
from moebus.observability.clock import Clock, SystemClock
from moebus.observability.health import Health
from moebus.observability.log import get_logger
from moebus.observability.metrics import Metrics
from moebus.schemas.control import ControlRequest, make_request
from moebus.schemas.control_args import HelloArgs, Method
from moebus.schemas.errors import FatalError, MoebusError
from moebus.schemas.members import HEARTBEAT_S, LIVE_S
from moebus.schemas.target import check_labels, check_worker_id

STALLED_S = 30.0
CHECK_S = 30.0
MAX_WAITING = 1000
RETRY_S = 1.0
_log = get_logger(__name__)


class Superseded(FatalError):
    """Another process started under one of this process's worker ids; this one has stopped."""

    exit_code: ClassVar[int] = 6


def _checked_ids(workers: Sequence[WorkerSpec]) -> list[str]:
    ids = [check_worker_id(spec.worker_id) for spec in workers]
    if not ids or len(set(ids)) != len(ids):
        raise ValueError(f"at least one worker and each id once are needed, not {ids}")
    for spec in workers:
        check_labels(spec.labels)
    return ids


class ControlWorkerHost:
    """Serves until `stop`. `start` runs it on a thread of its own, `run` on the caller's; `step` is one turn."""

    def __init__(
        self,
        broker: Broker,
        topics: Topics,
        workers: Sequence[WorkerSpec],
        *,
        clock: Clock | None = None,
        metrics: Metrics | None = None,
        health: Health | None = None,
        fault: Fault = lambda name: None,
        threads: bool = True,
        heartbeat: float = HEARTBEAT_S,
        rng: random.Random | None = None,
        grace: float = 20.0,
    ) -> None:
        """`threads=False`: `step` also does the workers' work, on the caller's thread. `fault` is called at named
        points of every operation. `grace`: seconds that what runs has to end when the process leaves. Nothing
        connects before `open`.

        Raises:
            InvalidInput: a worker id or a label that cannot be used.  ValueError: no worker, or one id twice.
        """
        self._ids = _checked_ids(workers)
        self._broker, self._topics, self._specs, self._fault = broker, topics, list(workers), fault
        self._clock = clock or SystemClock()
        self._metrics = metrics or Metrics()
        self._threads, self._grace, self._heartbeat = threads, grace, heartbeat
        self._rng = rng or random.Random()
        self.boot_id = uuid.UUID(int=self._rng.getrandbits(128)).hex[:16]
        self._name = f"{self._ids[0]}-{self.boot_id}"
        self.broker_clock = BrokerClock(self._clock)
        self._feed = Feed(broker, topics, self._ids, self._name)
        self._seats: list[Seat] = []
        self._history: list[Entry] = []
        self._stop, self._abandon = threading.Event(), threading.Event()
        self._writer: LogWriter | None = None
        self._journal: Journal | None = None
        self._upkeep: Upkeep | None = None
        self._check_at = self._turned_at = self._clock.monotonic()
        self._waiting: str | None = "not connected to the broker yet"
        self._thread: threading.Thread | None = None
        self.error: BaseException | None = None
        if health is not None:
            self._add_checks(health)

    # -- life

    def open(self) -> None:
        """Connects and says hello, waiting for a broker and its topics as long as it takes. Raises Stopped."""
        assert self._writer is None, "open was called before"
        self._writer = self._broker.writer(self._name)
        self._journal = Journal(self._writer, self._topics, self.broker_clock, self._name, self._abandon)
        while True:
            try:
                self._feed.open()
                break
            except (BrokerUnavailable, TopicMissing) as error:
                self._waiting = str(error)
                self._turned_at = self._clock.monotonic()
                _log.warning("control.waiting", str(error))
                if self._stop.wait(RETRY_S):
                    raise Stopped("the worker was stopped before it found its broker") from None
        self._check_at = self._clock.monotonic()
        shared = Shared(
            self._broker, self._topics, self._journal, self._feed.index, self.broker_clock, self._metrics, self._fault
        )
        self._seats = [self._seat(spec, shared) for spec in self._specs]
        self._upkeep = Upkeep(self._seats, shared, self._clock, self._heartbeat)
        for seat in self._seats:
            seat.hello = self._journal.acked(self._journal.request(self._hello(seat.worker))).offset
        self._waiting = None

    def _seat(self, spec: WorkerSpec, shared: Shared) -> Seat:
        worker = Worker(spec, self.boot_id, shared)
        seat = Seat(worker, Executor(spec.worker_id, worker.before_job))
        seat.patience_ms = self._rng.randrange(VOID_SPREAD_MS)
        if self._threads:
            seat.executor.start()
        return seat

    def _hello(self, worker: Worker) -> ControlRequest:
        args = HelloArgs(
            worker=worker.spec.worker_id, boot=self.boot_id, engine=worker.reporter.engine_id, labels=worker.spec.labels
        )
        return make_request(f"hello-{args.worker}-{args.boot}", Method.HELLO, args.model_dump(), issuer=args.worker)

    def run(self) -> None:
        """Opens, serves until `stop`, then leaves.

        Raises:
            Superseded: another process took over one of the ids.  LogReplaced: the log is another one.
        """
        try:
            self.open()
            while not self._stop.is_set():
                self.step(0.2)
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.close()

    def start(self) -> ControlWorkerHost:
        """Runs on a thread of its own; look at `error` and `alive` for how it ended."""
        self._thread = threading.Thread(target=self._run_quietly, name="control-host", daemon=True)
        self._thread.start()
        return self

    def _run_quietly(self) -> None:
        try:
            self.run()
        except BaseException as error:  # the thread ends here; `error` keeps it
            _log.error("control.host_failed", str(error), exc=error)

    @property
    def alive(self) -> bool:
        """Whether the thread of `start` runs."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout: float = 30.0) -> None:
        """Ends `run`; waits for the thread of `start`. A second call does nothing."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def close(self) -> None:
        """Leaves: no further operation begins, those that run may end, last states and tombstones are written.

        What does not end within the grace time is abandoned without a tombstone, as by a crash.
        """
        self._stop.set()
        timer = threading.Timer(self._grace, self._abandon.set)
        timer.daemon = True
        timer.start()
        ended = [seat for seat in self._seats if self._wait_for(seat) and seat.taken and seat.executor.error is None]
        try:
            for seat in ended:
                seat.worker.reporter.leave()
        except Exception as error:  # the broker is gone: heartbeats end, so does this worker for the others
            _log.warning("control.left_silently", str(error))
        timer.cancel()
        self._abandon.set()
        self._feed.close()
        if self._writer is not None:
            self._writer.close(1.0)

    def _wait_for(self, seat: Seat) -> bool:
        """Whether the operation that runs has ended; it beats while it waits."""
        while not seat.executor.stop(min(self._heartbeat, 0.5)):
            if self._abandon.is_set():
                return False
            if self._upkeep is not None:
                self._upkeep.beat(None)
        return True

    # -- one turn

    def step(self, timeout: float = 0.0) -> None:
        """Reads for up to `timeout` seconds, hands entries to the workers, beats. Raises as `run`."""
        self._turned_at = self._clock.monotonic()
        crowded = any(seat.executor.waiting > MAX_WAITING for seat in self._seats)
        entries = [] if crowded and self._stop.wait(timeout) is not None else self._feed.poll(timeout)
        for entry in entries:
            self._supersede(entry)
        if not all(seat.taken for seat in self._seats):
            self._history.extend(self._lighter(entry) for entry in entries)
        self._dead_letters()
        for entry in entries:
            for seat in self._seats:
                if seat.taken:
                    self._dispatch(seat, entry)
        self._take_over()
        if not self._threads:
            for seat in self._seats:
                seat.executor.run_pending()
        self._failures()
        assert self._upkeep is not None, "open first"
        self._upkeep.beat(None if self._stop.is_set() else self._feed.position)
        self._upkeep.void_overdue()
        self._check()

    def _lighter(self, entry: Entry) -> Entry:
        return entry.without_payload(self.broker_clock.now_ms())

    def _supersede(self, entry: Entry) -> None:
        hello = hello_of(entry)
        for seat in self._seats:
            if hello is None or hello.worker != seat.worker.spec.worker_id or hello.boot == self.boot_id:
                continue
            if entry.offset > seat.hello:
                raise Superseded(
                    f"worker {hello.worker} was started again elsewhere (boot {hello.boot}, offset {entry.offset}); "
                    "this process stops"
                )

    def _dispatch(self, seat: Seat, entry: Entry) -> None:
        if not seat.worker.concerns(entry):
            return
        status = entry.request is not None and entry.request.method is Method.STATUS
        if status and entry.kind is Kind.COMMAND and entry.standing is Standing.FIRST and not seat.executor.idle:
            seat.worker.status(entry)
        else:
            seat.executor.put(partial(seat.worker.handle, entry))

    def _take_over(self) -> None:
        waiting = [seat for seat in self._seats if not seat.taken]
        if not waiting or self._feed.position <= max(seat.hello for seat in self._seats):
            return
        if not self._feed.members_read():
            return
        members = self._feed.members
        members.begin()
        for seat in waiting:
            worker_id = seat.worker.spec.worker_id
            if not members.silent(worker_id, self.broker_clock.now_ms()):
                seat.worker.reporter.waiting = "another process of this worker still lives"
                continue
            if not self._reached(seat):
                continue
            prior = members.prior(worker_id)
            seat.taken = True
            self._dead_letters()
            seat.executor.put(partial(take_over, seat.worker, prior, tuple(self._history), seat.hello))
        if all(seat.taken for seat in self._seats):
            self._history.clear()
            self._feed.leave_members()

    def _reached(self, seat: Seat) -> bool:
        """Whether the engine can be driven; it is asked again at every turn until it can."""
        reporter, engine = seat.worker.reporter, seat.worker.spec.engine
        try:
            identity = engine.identity()
            engine.inspect()
        except Exception as error:  # whatever a server answers ends no other worker of this process
            reason = str(error) if isinstance(error, MoebusError) else f"{type(error).__name__}: {error}"
            if reporter.waiting != reason:
                text = f"{reason}; the worker waits and goes on by itself"
                _log.warning("control.engine_awaited", text, worker_id=seat.worker.spec.worker_id)
            reporter.waiting = reason
            return False
        reporter.engine_id = identity[:128]
        return True

    def _dead_letters(self) -> None:
        """Puts aside what has no readable id, from where the workers of this process take part, before one of them
        can say that it dealt with it."""
        taken = [seat for seat in self._seats if seat.taken]
        if not self._feed.bad or not taken:
            return
        assert self._journal is not None
        first = min(self._since(seat) for seat in taken)
        for record, error in (one for one in self._feed.bad if one[0].offset >= first):
            self._journal.acked(self._journal.dead_letter(record, error.reason, error.detail))
            self._metrics.inc("moebus_dead_letters_total", reason=error.reason)
            _log.warning("control.dead_letter", error.detail, reason=error.reason, position=str(record))
        all_taken = len(taken) == len(self._seats)
        self._feed.bad = [] if all_taken else [one for one in self._feed.bad if one[0].offset < first]

    def _since(self, seat: Seat) -> int:
        prior = self._feed.members.prior(seat.worker.spec.worker_id)
        return seat.hello if prior is None or prior.applied is None else prior.applied

    def _failures(self) -> None:
        for seat in self._seats:
            if seat.executor.error is not None:
                raise seat.executor.error

    def _check(self) -> None:
        now = self._clock.monotonic()
        if now >= self._check_at + CHECK_S:
            self._check_at = now
            self._feed.check()

    # -- health

    def _add_checks(self, health: Health) -> None:
        health.add_live("control loop", self._stalled)
        health.add_ready("workers", self._not_ready)

    def _stalled(self) -> str | None:
        if self.error is not None:
            return f"the control loop ended: {self.error}"
        quiet = self._clock.monotonic() - self._turned_at
        return f"the control loop has not turned for {quiet:.0f} s" if quiet > STALLED_S else None

    def _not_ready(self) -> str | None:
        if self._waiting is not None:
            return self._waiting
        silence = self.broker_clock.silence()
        if silence > LIVE_S:
            return (
                f"Kafka has acknowledged nothing for {silence:.0f} s: the fleet counts this process's workers as gone"
            )
        reasons = [seat.worker.not_ready() for seat in self._seats]
        return "; ".join(reason for reason in reasons if reason) or None
