"""The one thread that writes: reads the log, applies, commits, tidies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from moebus.broker.errors import BrokerUnavailable, OffsetOutOfRange
from moebus.broker.ports import Broker, LogReader, LogRecord, TopicPartition
from moebus.consumers.dead_letters import DeadLetters
from moebus.consumers.store.ahead import ReadAhead
from moebus.consumers.store.blobs.port import Blobs
from moebus.consumers.store.changes import Changes
from moebus.consumers.store.courtesy import Courtesy
from moebus.consumers.store.disk import DiskShares
from moebus.consumers.store.env import EnvDamaged, is_torn, wipe
from moebus.consumers.store.fullness import Stops
from moebus.consumers.store.ingest import Outcome
from moebus.consumers.store.options import StoreOptions
from moebus.consumers.store.partition import Guard, Partition, StoreFull
from moebus.consumers.store.progress import Progress
from moebus.consumers.store.recorder import Recorder
from moebus.consumers.store.repeats import Repeats
from moebus.consumers.store.source import Source
from moebus.observability.clock import Clock
from moebus.observability.log import get_logger
from moebus.schemas.errors import SettingsError
from moebus.schemas.record import Clear, Delete

_log = get_logger(__name__)
_POLL = 0.2
_TEND = 1.0
_HEAL_EVERY = 60.0
_BATCH_RECORDS = 64
_LINGER = 0.002
"""Seconds without a record after which a batch that makes a rollout whole is committed: a trainer may wait for it."""
_REST = 3.0
"""Such a batch is committed at once where the last commit is over for so many times its own duration."""


class Follower:
    """`run` is the thread; `partitions` is complete once `progress` no longer waits."""

    def __init__(
        self,
        broker: Broker,
        source: Source,
        folder: Path,
        options: StoreOptions,
        dead: DeadLetters,
        progress: Progress,
        recorder: Recorder,
        clock: Clock,
        stopping: threading.Event,
        blobs: Callable[[int], Blobs | None] = lambda _: None,
        changed: Callable[[Changes | None], None] | None = None,
    ) -> None:
        """`blobs`: of a partition; None for LMDB. `changed`: is told what each commit changed, None: anything may have;
        it must not block."""
        self.partitions: dict[int, Partition] = {}
        self.rebuild_to: Guard | None = None
        self.broker_now_ms = 0
        self.courtesy = Courtesy()
        """What takes rollouts away gives way to those who read inside of its `answering`."""
        self._source = source
        self._folder = folder
        self._options = options
        self._dead = dead
        self._progress = progress
        self._recorder = recorder
        self._clock = clock
        self._stopping = stopping
        self._reader: LogReader = broker.reader("moebus-store")
        self._ahead = ReadAhead(lambda: broker.reader("moebus-store-ahead"), source.topic)
        self._blobs = blobs
        self._changed = changed
        self._stops = Stops()
        self._repeats = Repeats()
        self._healed_at: dict[int, float] = {}
        self._torn: dict[int, str] = {}
        self._dirty_since: float | None = None
        self._rested_at = float("-inf")
        self._tended = clock.monotonic()
        self._tending = 0.0

    def run(self) -> None:
        """Until told to stop. What is not committed then is read again by the next start."""
        try:
            if self._open():
                while not self._stopping.is_set():
                    self.step()
        finally:
            for partition in self.partitions.values():
                partition.close()
            self._ahead.close()
            self._reader.close()

    def step(self) -> None:
        """One turn: poll, apply, commit if it is time, tidy if it is time."""
        if self.rebuild_to is not None:
            self._rebuild(list(self.partitions), self.rebuild_to)
        self._heal()
        try:
            awaited = any(partition.completes for partition in self.partitions.values())
            patience = min(_POLL, self._patience())
            records = self._reader.poll(min(patience, _LINGER) if awaited else patience, _BATCH_RECORDS)
        except OffsetOutOfRange as error:
            _log.error("store.rebuild", str(error), partition=error.partition)
            self._rebuild([error.partition], self.partitions[error.partition].guard)
            return
        for record in records:
            self._take(record)
            if self._too_large():
                self.commit()
        if self._patience() <= 0 or (awaited and not records) or self._may_commit(records):
            self.commit()
        if self._clock.monotonic() - self._tended >= _TEND:
            self._tend()
        if self._stops.standing:
            self._make_room()

    def commit(self) -> None:
        """Makes every open batch durable, dead letters first."""
        if not self._dead.settle(self._stopping):
            return
        self._dirty_since = None
        began = self._clock.monotonic()
        for partition in self.partitions.values():
            partition.blobs.flush()  # all of them at once
        for number, partition in self.partitions.items():
            if partition.dirty:
                with self._mending(number):
                    self._commit_one(number, partition)
        ended = self._clock.monotonic()
        self._rested_at = ended + _REST * (ended - began)

    def _may_commit(self, records: Sequence[LogRecord]) -> bool:
        """Whether a rollout became whole, nothing more is at hand, and commits are not all that is done."""
        whole = any(partition.completes for partition in self.partitions.values())
        calm = len(records) < _BATCH_RECORDS and not self._stops.standing
        return whole and calm and self._clock.monotonic() >= self._rested_at

    def _open(self) -> bool:
        found = self._source.wait(self._progress, self._stopping)
        if found is None:
            return False
        rules = self._options.rules_for(found.total)
        options = self._options
        paths = {number: self._folder / self._source.topic / f"{number:05d}" for number in found.numbers}
        shares = DiskShares(paths, options.map_bytes)
        for number, path in paths.items():
            make = partial(
                Partition, number, path, found.guard, rules, options.map_bytes, options.sync, self._blobs(number),
                partial(shares.room, number),
            )  # fmt: skip
            partition = _opened(number, path, make)
            partition.watched = self._changed is not None
            if partition.next_offset is None:
                partition.skip_to(found.starts[number])
            self.partitions[number] = partition
            self._progress.follow(number, found.ends[number], partition.next_offset or 0)
            self._recorder.sizes(number, partition.figures())
        self._reader.assign({self._tp(n): p.next_offset or 0 for n, p in self.partitions.items()})
        self._progress.wait_for(None)
        return True

    def _take(self, record: LogRecord) -> None:
        if record.partition in self._stops.standing or record.partition in self._torn:
            return
        with self._mending(record.partition):
            self._apply(record)

    def _apply(self, record: LogRecord) -> None:
        number, partition = record.partition, self.partitions[record.partition]
        try:
            outcome = partition.apply(record.offset, record.value, max(0, record.timestamp_ms))
        except StoreFull as error:
            self._stop_ingest(number, partition, error)
            return
        if outcome.dead and record.value is not None:
            self._dead.add(record, outcome.reason, outcome.detail)
        if outcome.readable and outcome.completed is not None:
            self._progress.readable(number, outcome.completed.key)
        self._recorder.record(record, outcome, again=self._repeats.seen(partition, outcome))
        self._say(record, outcome)
        if self._dirty_since is None:
            self._dirty_since = self._clock.monotonic()

    def _say(self, record: LogRecord, outcome: Outcome) -> None:
        if outcome.fence is not None:
            _log.info("store.fence", str(outcome.fence), position=str(record))
        elif outcome.dead:
            text = f"{outcome.kind} {outcome.verdict}: {outcome.detail or outcome.reason}"
            _log.warning("store.dead_letter", text, position=str(record), reason=outcome.reason)
        elif outcome.reason:  # counted; late retries after a delete are normal
            text = f"{outcome.kind} {outcome.verdict}: {outcome.reason}"
            _log.debug("store.not_taken", text, position=str(record))

    def _commit_one(self, number: int, partition: Partition) -> None:
        began = self._clock.monotonic()
        try:
            batch = partition.commit()
        except StoreFull as error:
            self._stop_ingest(number, partition, error)
            return
        if self._stops.passed(number, partition.next_offset or 0):
            self._resumed(number)
        self._progress.advance(number, partition.next_offset or 0)
        if self._changed is not None:
            self._changed(batch.changes)
        self._recorder.committed(number, batch, partition.figures(ask=False), self._clock.monotonic() - began)

    def _patience(self) -> float:
        """Seconds that the open batch may still wait."""
        if self._dirty_since is None:
            if not self._tended:  # something is being taken away: half of the time is left to those who read
                return max(_LINGER, min(_POLL, self._tending))
            return 0.02 if self._stops.standing else _POLL
        return max(0.0, self._dirty_since + self._options.commit_interval - self._clock.monotonic())

    def _too_large(self) -> bool:
        most = self._options.batch_bytes
        return any(p.batch_bytes >= min(most, p.batch_limit) for p in self.partitions.values())

    def _tend(self) -> None:
        began, rested = self._clock.monotonic(), self.courtesy.rested
        self._tended = began
        self.courtesy.begin()
        for number, partition in self.partitions.items():
            if number in self._torn:
                continue
            with self._mending(number):
                if self._tidy(number, partition):
                    self._tended = 0.0  # there is more: the next turn goes on
                position = self._reader.position(self._tp(number))
                if not partition.dirty and position > (partition.next_offset or 0):
                    self._progress.advance(number, position)  # the end of the log is a gap
        self._tending = self._clock.monotonic() - began - (self.courtesy.rested - rested)

    def _tidy(self, number: int, partition: Partition) -> bool:
        # The log tells the time. Past its last record the broker does, as of before that end was asked for: no record
        # that is still to come is older, so no store takes away what another still finds held.
        now_ms = max(partition.now_ms, self._progress.time_at_end(number))
        try:
            more = partition.tidy(now_ms, self.courtesy.give_way)
        except StoreFull as error:
            self._stop_ingest(number, partition, error)
            return False
        if partition.dirty and self._dirty_since is None:
            self._commit_one(number, partition)
        return more

    def _stop_ingest(self, number: int, partition: Partition, error: StoreFull) -> None:
        """Full: the partition stands at the record that did not fit; deletes behind it may make room."""
        offset, figures = partition.next_offset or 0, partition.figures()
        now = self._clock.monotonic()
        if self._stops.stop(number, offset, figures.used_bytes, figures.room_bytes, lost=error.lost, now=now):
            _log.error("store.full", f"partition {number} takes nothing in: {error}", partition=number)
        self._progress.full(number, str(error))
        self._recorder.stopped(number, True)
        if partition.dirty:
            self.commit()
        offset = partition.next_offset or 0
        self._reader.pause([self._tp(number)])
        self._reader.seek(self._tp(number), offset)
        self._ahead.begin(number, offset)

    def _make_room(self) -> None:
        self.courtesy.begin()
        self._ahead.step(self._take_away)
        for number in list(self._stops.standing):
            with self._mending(number):
                self._make_room_in(number, self.partitions[number])

    def _make_room_in(self, number: int, partition: Partition) -> None:
        more = self._tidy(number, partition)
        held, now = partition.figures(), self._clock.monotonic()
        may = self._stops.may_resume(number, held.used_bytes, held.room_bytes, now)
        if not more and may and partition.blobs.trouble() is None:
            self._resume(number)

    def _take_away(self, number: int, record: Delete | Clear, spare: frozenset[bytes]) -> None:
        partition = self.partitions[number]
        with self._mending(number):
            try:
                partition.take_away(record, partition.now_ms, spare)
            except StoreFull as error:
                _log.error("store.full", f"partition {number} has no room left to delete in: {error}", partition=number)
                return
            self._commit_one(number, partition)

    def _resume(self, number: int) -> None:
        if self._stops.resume(number):
            self._resumed(number)
        self._ahead.end(number)
        self._reader.resume([self._tp(number)])

    def _resumed(self, number: int) -> None:
        if self._stops.say_resumed(number):
            _log.info("store.resumed", f"partition {number} takes records in again", partition=number)
        self._progress.full(number, None)
        self._recorder.stopped(number, False)

    @contextmanager
    def _mending(self, number: int) -> Iterator[None]:
        """Where the file is damaged, the partition takes nothing in until it is made again; the others go on."""
        try:
            yield
        except Exception as error:
            if not is_torn(error):
                raise
            self._torn[number] = str(error)

    def _heal(self) -> None:
        """What was found missing or unreadable comes again from the log; not over and over where a disk is bad."""
        for number, partition in self.partitions.items():
            torn = self._torn.get(number)
            damage = torn or partition.damaged or partition.env.damaged
            if damage is None:
                continue
            since = self._clock.monotonic() - self._healed_at.get(number, float("-inf"))
            if since >= _HEAL_EVERY:
                self._rebuild([number], partition.guard, damage)
            elif torn is not None:
                raise SettingsError(f"store.data_dir: {partition.path}: damaged twice within a minute: {torn}")

    def _rebuild(self, numbers: Sequence[int], guard: Guard, damage: str | None = None) -> None:
        """Begins again at the start of the log: something between may have been missed, a delete perhaps."""
        tps = [self._tp(number) for number in numbers]
        try:
            starts, ends = self._source.range(tps)
        except BrokerUnavailable as error:
            _log.warning("store.waiting", str(error))
            self._stopping.wait(_TEND)
            return
        positions = {self._tp(n): self._reader.position(self._tp(n)) for n in self.partitions}
        for number, tp in zip(numbers, tps, strict=True):
            if number in self._stops.standing:
                self._resume(number)
            self._stops.forget(number)
            self._resumed(number)
            self._torn.pop(number, None)
            if damage is not None:
                _say_damage(number, damage)
                self._healed_at[number] = self._clock.monotonic()
            partition = self.partitions[number]
            partition.rebuild(guard)
            partition.skip_to(starts[tp])
            positions[tp] = starts[tp]
            self._progress.follow(number, ends[tp], starts[tp])
        self._reader.assign(positions)
        if self._changed is not None:
            self._changed(None)
        self.rebuild_to = None

    def _tp(self, number: int) -> TopicPartition:
        return TopicPartition(self._source.topic, number)


def _opened(number: int, path: Path, make: Callable[[], Partition]) -> Partition:
    """What is there; where its file is damaged, an empty one: it is read again from the log."""
    try:
        return make()
    except EnvDamaged as error:
        _say_damage(number, str(error))
    wipe(path)
    return make()


def _say_damage(number: int, damage: str) -> None:
    _log.error("store.rebuild", f"partition {number} is read again from the log: {damage}", partition=number)
