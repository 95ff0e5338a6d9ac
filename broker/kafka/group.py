"""GroupReader on kafka-python: a member of a consumer group whose listener is called on the polling thread."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kafka import errors as kafka_errors
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.structs import OffsetAndMetadata

from moebus.broker.errors import BrokerUnavailable, OffsetOutOfRange, PartitionLost
from moebus.broker.kafka.clients import Consumer, GiveUp, make_consumer, unavailable
from moebus.broker.kafka.config import KafkaConfig, group_options
from moebus.broker.kafka.connector import Connector, close_quietly
from moebus.broker.kafka.convert import from_kafka, record_from, to_kafka, to_kafka_all
from moebus.broker.kafka.events import Event, EventQueue
from moebus.broker.kafka.faults import Once, Pace, describe
from moebus.broker.kafka.joining import JoinWatch
from moebus.broker.kafka.mending import await_topics, finish_rejoin, free_parked, has_joined
from moebus.broker.ports import GroupListener, LogRecord, TopicPartition
from moebus.observability.log import get_logger

_log = get_logger(__name__)
_ANSWER_SECONDS = 5.0
_NOT_A_MEMBER: tuple[type[Exception], ...] = (
    kafka_errors.CommitFailedError,
    kafka_errors.FencedInstanceIdError,
    kafka_errors.IllegalGenerationError,
    kafka_errors.RebalanceInProgressError,
    kafka_errors.UnknownMemberIdError,
)


class KafkaGroupReader:
    """See `GroupReader`. Connects in the background from its making on, joins with its first poll."""

    def __init__(
        self,
        config: KafkaConfig,
        name: str,
        group: str,
        topics: Sequence[str],
        listener: GroupListener | None = None,
        session_timeout: float = 10.0,
    ) -> None:
        def make(give_up: GiveUp) -> Consumer:
            # Range, not cooperative-sticky: that one stops all partitions for a heartbeat interval.
            options = {
                **group_options(group, session_timeout, config.request_timeout),
                "partition_assignment_strategy": [RangePartitionAssignor],
            }
            consumer = make_consumer(config, name, options, config.connect_timeout, give_up)
            try:
                consumer.subscribe(topics=list(topics), listener=self._events)
                self._events.follow(consumer)
                await_topics(consumer, topics, give_up)
            except BaseException:
                close_quietly(consumer)
                raise
            return consumer

        self._config = config
        self._group = group
        self._listener = listener
        self._events = EventQueue()
        self._owned: set[TopicPartition] = set()
        self._paused: set[TopicPartition] = set()
        self._sought: set[TopicPartition] = set()
        self._consumer: Consumer | None = None
        self._said = Once()
        self._pace = Pace()
        self._watch = JoinWatch(session_timeout)
        self._closed = False
        self._connector = Connector(name, make)
        self._connector.get(0.0)

    @property
    def closed(self) -> bool:
        return self._closed

    def poll(self, timeout: float, max_records: int = 500) -> list[LogRecord]:
        if self._closed:
            return []
        deadline = time.monotonic() + timeout
        if not self._pace.wait(timeout):
            return []
        self._consumer = self._connector.get(timeout)
        if self._consumer is None:
            return []
        batches: Mapping[object, Sequence[object]] = {}
        free_parked(self._consumer)
        try:
            batches = self._consumer.poll(
                timeout_ms=max(0.0, deadline - time.monotonic()) * 1000, max_records=max_records
            )
            self._pace.well()
        except kafka_errors.NoOffsetForPartitionError as exc:
            self._begin(exc)
        except (kafka_errors.OffsetOutOfRangeError, kafka_errors.LogTruncationError) as exc:
            named = getattr(exc, "divergent_offsets", None) or (exc.args[0] if exc.args else {})
            for tp, offset in named.items():
                raise OffsetOutOfRange(tp.topic, tp.partition, offset if isinstance(offset, int) else -1) from exc
        except Exception as exc:  # a consumer that has come to harm is replaced; the group has the offsets
            if not self._closed:
                self._replace(exc)
        finish_rejoin(self._consumer)
        if self._watch.overdue(has_joined(self._consumer), time.monotonic()) and not self._closed:
            self._replace(TimeoutError("the rebalance does not end"))
        self._deliver()
        return [record for tp, records in batches.items() for record in self._wanted(from_kafka(tp), records)]

    def _begin(self, exc: Exception) -> None:
        """A new group, or a new partition of an old one, starts at the earliest offset."""
        assert self._consumer is not None
        here = self._consumer.assignment()
        named = set(exc.args[0] if exc.args else here) & set(here)
        if named:
            self._consumer.seek_to_beginning(*named)

    def _wanted(self, tp: TopicPartition, records: Sequence[object]) -> list[LogRecord]:
        """What may still be given out after the listener has been called: it may have sought or paused."""
        assert self._consumer is not None
        if tp not in self._owned or tp in self._sought:
            return []
        found = [record_from(record) for record in records]
        if tp in self._paused and found:
            self._consumer.seek(to_kafka(tp), found[0].offset)
            return []
        return found

    def _deliver(self) -> None:
        self._sought.clear()
        for event in self._events.take():
            self._note(event)
            if self._listener is not None:
                tell = self._listener.assigned if event.assigned else self._listener.revoked
                tell(event.tps)

    def _note(self, event: Event) -> None:
        self._paused -= set(event.tps)
        if event.assigned:
            self._owned |= set(event.tps)
        else:
            self._owned -= set(event.tps)

    def _replace(self, exc: Exception) -> None:
        text = describe(exc)
        if self._said.worth(text):
            _log.warning("reader.replaced", f"member of group {self._group} replaces its consumer: {text}")
        self._events.on_partitions_lost(to_kafka_all(self._owned))
        self._pace.failed()
        self._connector.drop()

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._owned)

    def seek(self, tp: TopicPartition, offset: int) -> None:
        if self._consumer is None or tp not in self._owned or to_kafka(tp) not in self._consumer.assignment():
            raise ValueError(f"{tp} is not assigned to this member of group {self._group}")
        self._consumer.seek(to_kafka(tp), offset)
        self._sought.add(tp)

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        self._switch(tps, pause=True)

    def resume(self, tps: Iterable[TopicPartition]) -> None:
        self._switch(tps, pause=False)

    def _switch(self, tps: Iterable[TopicPartition], *, pause: bool) -> None:
        if self._consumer is None:
            return
        known = self._consumer.assignment()
        here = [tp for tp in tps if tp in self._owned and to_kafka(tp) in known]
        if pause:
            self._paused |= set(here)
            self._consumer.pause(*to_kafka_all(here))
        else:
            self._paused -= set(here)
            self._consumer.resume(*to_kafka_all(here))

    def commit(self, positions: Mapping[TopicPartition, int]) -> None:
        lost = sorted(str(tp) for tp in positions if tp not in self._owned - self._events.going())
        if lost or self._consumer is None:
            raise PartitionLost(
                f"commit of {', '.join(lost)}: not assigned to this member of group {self._group} now; "
                "nothing was committed"
            )
        offsets = {to_kafka(tp): OffsetAndMetadata(offset, "", -1) for tp, offset in positions.items()}
        with self._answered("commit"):
            self._consumer.commit(offsets, timeout_ms=_ANSWER_SECONDS * 1000)

    def committed(self, tp: TopicPartition) -> int | None:
        consumer = self._consumer or self._connector.get(_ANSWER_SECONDS)
        if consumer is None:
            raise unavailable(self._config, _ANSWER_SECONDS, "not connected")
        with self._answered("committed offset"):
            found = consumer.committed(to_kafka(tp), timeout_ms=_ANSWER_SECONDS * 1000)
        return None if found is None else int(found)

    @contextmanager
    def _answered(self, what: str) -> Iterator[None]:
        try:
            yield
        except _NOT_A_MEMBER as exc:
            raise PartitionLost(f"{what} of group {self._group}: {describe(exc)}; nothing was committed") from exc
        except kafka_errors.KafkaError as exc:
            raise BrokerUnavailable(f"{what} of group {self._group}: no answer in time ({describe(exc)})") from exc

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            consumer = self._connector.close()
            if consumer is not None:
                close_quietly(consumer)
