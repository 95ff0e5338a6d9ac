"""Whole rollouts straight from Kafka as a group member: at least once, acknowledged in any order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from moebus.broker.errors import BrokerUnavailable, PartitionLost
from moebus.broker.ports import Broker, LogRecord, TopicPartition
from moebus.consumers.reader.assembly import Open, Tally
from moebus.consumers.reader.item import Claim, StreamItem
from moebus.consumers.reader.refetch import Refetcher
from moebus.consumers.reader.rollout import Rollout, check_rollout
from moebus.consumers.reader.whole import BaseSource, CardCheck, make_rollout
from moebus.observability.clock import Clock
from moebus.observability.log import get_logger
from moebus.observability.metrics import Metrics
from moebus.schemas.record import CheckLevel
from moebus.schemas.route_errors import RouteCorrupt, RouteDeleted, RouteNeverComing

POLL_SECONDS = 0.5
POLL_RECORDS = 64
"""At 900 KB a record one poll brings at most 58 MB beyond `max_open_bytes`."""
REFETCH_SECONDS = 30.0
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """`max_open_bytes`: record bytes of rollouts that are not whole yet; above it their chunks are read again at the
    END. `commit_interval`: seconds between commits. `base_wait`: seconds that a store gets to have a base. `checks`:
    how closely rows are looked at."""

    max_open_bytes: int = 256 << 20
    commit_interval: float = 0.5
    base_wait: float = 30.0
    session_timeout: float = 10.0
    checks: CheckLevel = "ids"


class RolloutStream:
    """Iterate over it; one thread does. `close` commits what is acknowledged and leaves the group."""

    def __init__(
        self,
        broker: Broker,
        topic: str,
        *,
        run: str,
        group: str,
        idle_timeout: float | None,
        bases: BaseSource,
        check_card: CardCheck,
        options: StreamOptions,
        metrics: Metrics,
        clock: Clock,
        on_close: Callable[[RolloutStream], None],
    ) -> None:
        self._topic = topic
        self._run = run
        self._idle = idle_timeout
        self._bases = bases
        self._check_card = check_card
        self._options = options
        self._metrics = metrics
        self._clock = clock
        self._on_close = on_close
        self._lock = threading.RLock()
        self._partitions: dict[TopicPartition, Claim] = {}
        self._begins: dict[TopicPartition, int] = {}
        self._unplaced: set[TopicPartition] = set()
        self._ready: deque[tuple[Claim, Open]] = deque()
        self._gone = Tally()
        self._corrupt = 0
        self._closed = False
        self._committed_at = clock.monotonic()
        self._refetcher = Refetcher(broker, f"moebus-refetch-{group}", clock)
        self._reader = broker.group_reader(
            f"moebus-routes-{group}", group, [topic], listener=self, session_timeout=options.session_timeout
        )

    # --- iteration ---

    def __iter__(self) -> Iterator[StreamItem]:
        return self

    def __next__(self) -> StreamItem:
        """The next whole rollout of status complete. StopIteration: none for `idle_timeout` seconds, or closed.

        Raises:
            BrokerUnavailable, StoreCatchingUp, RouteNotYet: bytes of the next one (evicted chunks, rows of its base)
                cannot be had now; call again. OffsetOutOfRange: retention overtook this group.
        """
        deadline = None if self._idle is None else self._clock.monotonic() + self._idle
        while not self._closed:
            item = self._next_ready()
            if item is not None:
                return item
            self._commit(force=False)
            self._place()
            left = POLL_SECONDS if deadline is None else max(0.0, deadline - self._clock.monotonic())
            for record in self._reader.poll(min(POLL_SECONDS, left), POLL_RECORDS):
                self._feed(record)
            idle = deadline is not None and self._clock.monotonic() >= deadline
            if idle and not self._ready and not self._unplaced:
                break
        if not self._closed:
            self._commit(force=True)
        raise StopIteration

    def close(self) -> None:
        """Commits what is acknowledged and leaves the group; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._commit(force=True)
        self._reader.close()
        self._refetcher.close()
        self.revoked(list(self._partitions))
        self._on_close(self)

    def assignment(self) -> frozenset[TopicPartition]:
        """Partitions that this member has at the moment."""
        return self._reader.assignment()

    def tally(self) -> dict[str, int]:
        """Attempts and records that were not delivered, by reason, since the start."""
        with self._lock:
            parts = [self._gone, *(partition.assembler.tally for partition in self._partitions.values())]
            total = {name: sum(getattr(part, name) for part in parts) for name in Tally.__dataclass_fields__}
            return {**total, "corrupt": self._corrupt}

    def __enter__(self) -> RolloutStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- GroupListener, on the thread that polls ---

    def assigned(self, tps: Sequence[TopicPartition]) -> None:
        """Holds them until `_place` has looked where the group is: a client may go on at its own position where it
        had the partition before, past what was delivered and not acknowledged."""
        self._unplaced |= set(tps)
        self._reader.pause(tps)

    def revoked(self, tps: Sequence[TopicPartition]) -> None:
        """Drops everything of these partitions, ready or not; the next owner starts at what was committed."""
        with self._lock:
            self._unplaced -= set(tps)
            for tp in tps:
                partition = self._partitions.pop(tp, None)
                if partition is not None:
                    partition.lost = True
                    _add(self._gone, partition.assembler.tally)
            self._ready = deque(entry for entry in self._ready if not entry[0].lost)

    # --- inside ---

    def _place(self) -> None:
        """Puts newly assigned partitions where the group has committed, else where it began."""
        for tp in sorted(self._unplaced):
            try:
                committed = self._reader.committed(tp)
            except BrokerUnavailable as exc:  # asked again at the next turn; nothing is read of it until then
                _log.warning("routes.place_failed", f"where {tp} goes on is not known yet: {exc}", topic=self._topic)
                return
            begin = self._begins.get(tp) if committed is None else committed
            if begin is not None:
                self._reader.seek(tp, begin)
            self._reader.resume([tp])
            self._unplaced.discard(tp)

    def _feed(self, record: LogRecord) -> None:
        with self._lock:
            partition = self._partitions.get(record.tp)
            if partition is None:
                self._begins.setdefault(record.tp, record.offset)
                partition = self._partitions[record.tp] = Claim(record.tp, self._run, record.offset)
            whole = partition.assembler.feed(record)
            if whole is not None:
                self._ready.append((partition, whole))
            self._stay_within_bound()

    def _stay_within_bound(self) -> None:
        while sum(p.assembler.held_bytes for p in self._partitions.values()) > self._options.max_open_bytes:
            fullest = max(self._partitions.values(), key=lambda p: p.assembler.held_bytes)
            largest = fullest.assembler.largest()
            if largest is None:
                return
            fullest.assembler.evict(largest)

    def _next_ready(self) -> StreamItem | None:
        while self._ready:
            partition, attempt = self._ready[0]
            try:
                rollout = self._rollout(partition.tp, attempt)
            except (RouteCorrupt, RouteNeverComing, RouteDeleted) as exc:
                self._set_aside(partition, attempt, exc)
                continue
            self._ready.popleft()
            attempt.chunks.clear()  # the user may keep the item for long
            self._metrics.inc("moebus_reader_resolved_total", outcome="streamed")
            return StreamItem(rollout, partition, attempt, self._lock)
        return None

    def _rollout(self, tp: TopicPartition, attempt: Open) -> Rollout:
        evicted = sorted((held.offset, held.checksum) for held in attempt.chunks.values() if held.chunk is None)
        again = self._refetcher.fetch(tp, evicted, REFETCH_SECONDS) if evicted else {}
        rollout = make_rollout(attempt, again, self._bases, self._options.base_wait)
        return check_rollout(self._check_card(rollout), self._options.checks)

    def _set_aside(self, partition: Claim, attempt: Open, why: Exception) -> None:
        with self._lock:
            self._ready.popleft()
            self._corrupt += 1
            partition.assembler.release(attempt)
        self._metrics.inc("moebus_reader_resolved_total", outcome=type(why).__name__)
        text = f"{attempt.header.key} is not delivered: {why}"
        _log.warning("routes.set_aside", text, position=f"{partition.tp}/{attempt.end_offset}")

    def _commit(self, *, force: bool) -> None:
        now = self._clock.monotonic()
        if not force and now - self._committed_at < self._options.commit_interval:
            return
        self._committed_at = now
        with self._lock:
            low = {tp: p.assembler.watermark.low() for tp, p in self._partitions.items()}
            due = {tp: offset for tp, offset in low.items() if offset > self._partitions[tp].committed}
        if not due:
            return
        try:
            self._reader.commit(due)
        except (PartitionLost, BrokerUnavailable) as exc:  # delivered again, or committed next time
            _log.warning("routes.commit_failed", f"offsets are not committed: {exc}", topic=self._topic)
            return
        for tp, offset in due.items():
            if tp in self._partitions:
                self._partitions[tp].committed = offset


def _add(total: Tally, part: Tally) -> None:
    for name in Tally.__dataclass_fields__:
        setattr(total, name, getattr(total, name) + getattr(part, name))
