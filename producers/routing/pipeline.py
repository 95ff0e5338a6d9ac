"""The publisher's thread: takes jobs in order, encodes and appends their records, settles them after the acks.

One thread owns all of it. The log's callbacks only put an event into its inbox, so user callbacks never run on a
thread of the Kafka client and the number of unfinished appends stays within a window.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

from moebus.broker.errors import AppendUnknown, BrokerUnavailable
from moebus.broker.ports import LogWriter, OutRecord, Position
from moebus.observability.log import get_logger
from moebus.producers.routing.errors import PublisherClosed

WINDOW, WINDOW_BYTES = 32, 12 << 20
"""Unfinished appends at most, and bytes of them from which on no more are begun: enough to fill the pipe."""
RETRY_SECONDS = 0.5
_log = get_logger(__name__)


@dataclass(eq=False)
class Job:
    """Records that count together or not at all: without the last one the others mean nothing.

    `open` may ask the broker (BrokerUnavailable: asked again later) and returns the records, encoded one by one as
    they are wanted. `settle` is called once, on the pipeline's thread: positions in record order, or the error.
    """

    name: str
    open: Callable[[], Iterator[OutRecord]]
    settle: Callable[[list[Position] | Exception], None]
    seq: int = 0
    records: Iterator[OutRecord] | None = None
    positions: list[Position | None] = field(default_factory=list)
    open_appends: int = 0
    all_sent: bool = False
    error: Exception | None = None


class Pipeline:
    """See the module. `put` never blocks; whoever puts bounds the bytes."""

    def __init__(self, writer: LogWriter, *, window: int = WINDOW, name: str = "moebus-routes") -> None:
        self._writer = writer
        self._window = window
        self._cond = threading.Condition()
        self._queue: deque[Job] = deque()
        self._inbox: deque[tuple[Job, int, int, Future[Position]]] = deque()
        self._unsettled: dict[int, Job] = {}
        self._seq = 0
        self._open_appends = 0
        self._open_bytes = 0
        self._failures = 0
        self._closed = False
        self._give_up = False
        self._retry = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def check_open(self, name: str) -> None:
        """Raises PublisherClosed after `close`."""
        if self._closed:
            raise PublisherClosed(f"{name}: the publisher is closed; make a new one")

    def put(self, job: Job) -> None:
        """Queues a job. Raises PublisherClosed after `close`."""
        with self._cond:
            self.check_open(job.name)
            self._seq += 1
            job.seq = self._seq
            self._unsettled[job.seq] = job
            self._queue.append(job)
            self._cond.notify_all()

    def note_failure(self) -> None:
        """Counts a submission that failed before it became a job, so that `flush` tells of it."""
        with self._cond:
            self._failures += 1

    def unsettled(self) -> list[str]:
        """Names of the jobs that are not settled, oldest first."""
        with self._cond:
            return [job.name for job in self._unsettled.values()]

    def waiting(self) -> int:
        """How many jobs are not settled."""
        with self._cond:
            return len(self._unsettled)

    def flush(self, timeout: float) -> bool:
        """Waits for every job put before this call. True: all are stored, and so is everything since the last
        flush; False: `timeout` seconds passed, or something failed."""
        with self._cond:
            last = self._seq
            settled = self._cond.wait_for(lambda: next(iter(self._unsettled), last + 1) > last, timeout)
            failures, self._failures = self._failures, 0
            return settled and failures == 0

    def close(self, timeout: float) -> list[str]:
        """Takes nothing more, waits up to `timeout` seconds, then gives up. Returns the names of what was given
        up; what had failed before has told its receipt."""
        with self._cond:
            if self._closed:
                return []
            self._closed = True
            self._cond.wait_for(lambda: not self._unsettled, timeout)
            left = list(self._unsettled.values())
            self._give_up = True
            self._cond.notify_all()
        self._writer.close(0)  # settles every append, so the thread sees the last events and ends
        self._thread.join()
        return [job.name for job in left if job.error is not None]

    # --- everything below runs on the thread ---

    def _run(self) -> None:
        while True:
            with self._cond:
                self._cond.wait_for(self._has_work, RETRY_SECONDS if self._retry else None)
                self._retry = False
                events, self._inbox = self._inbox, deque()
                give_up = self._give_up
            for event in events:
                self._acked(*event)
            if give_up:
                self._abandon()
                if not self._open_appends:
                    return
            elif self._queue and self._has_window():
                self._step()

    def _has_work(self) -> bool:
        if self._inbox or self._give_up:
            return bool(self._inbox) or not self._open_appends or bool(self._queue)
        return bool(self._queue) and self._has_window() and not self._retry

    def _has_window(self) -> bool:
        return self._open_appends < self._window and self._open_bytes < WINDOW_BYTES

    def _step(self) -> None:
        """Sends one record of the oldest job that has some."""
        job = self._queue[0]
        try:
            if job.records is None:
                job.records = job.open()
            record = next(job.records, None)
            if record is not None and job.error is None:
                self._append(job, record)
                return
        except BrokerUnavailable as exc:
            self._retry = True
            _log.warning("routes.waiting", f"{job.name} waits: {exc}", job=job.name)
            return
        except Exception as exc:  # a record that cannot be made or is refused fails its job, never the thread
            job.error = job.error or exc
        self._end(job)

    def _append(self, job: Job, record: OutRecord) -> None:
        index, size = len(job.positions), len(record.value or b"")
        future = self._writer.append(record)
        job.positions.append(None)
        job.open_appends += 1
        self._open_appends += 1
        self._open_bytes += size
        future.add_done_callback(lambda done: self._on_ack(job, index, size, done))

    def _on_ack(self, job: Job, index: int, size: int, future: Future[Position]) -> None:
        with self._cond:  # on a thread of the log's adapter
            self._inbox.append((job, index, size, future))
            self._cond.notify_all()

    def _acked(self, job: Job, index: int, size: int, future: Future[Position]) -> None:
        job.open_appends -= 1
        self._open_appends -= 1
        self._open_bytes -= size
        error = future.exception()
        if error is None:
            job.positions[index] = future.result()
        elif job.error is None:
            job.error = error if isinstance(error, Exception) else AppendUnknown(str(error))
        if job.all_sent and not job.open_appends:
            self._settle(job)

    def _end(self, job: Job) -> None:
        with self._cond:
            self._queue.popleft()
        job.all_sent, job.records = True, None
        if not job.open_appends:
            self._settle(job)

    def _abandon(self) -> None:
        while self._queue:
            job = self._queue[0]
            if job.error is None:
                sent = bool(job.positions)
                text = f"{job.name}: the publisher was closed before all of it was sent"
                job.error = AppendUnknown(text) if sent else PublisherClosed(text + "; nothing of it is in the log")
            self._end(job)

    def _settle(self, job: Job) -> None:
        try:
            job.settle(job.error or [p for p in job.positions if p is not None])
        except Exception as exc:
            _log.error("routes.settle_failed", f"{job.name}: a receipt could not be settled: {exc}", exc=exc)
        with self._cond:
            if job.error is not None:
                self._failures += 1
            del self._unsettled[job.seq]
            self._cond.notify_all()
