"""LogReader on kafka-python: manual assignment, explicit positions, nothing skipped in silence."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from kafka import errors as kafka_errors

from moebus.broker.errors import OffsetOutOfRange
from moebus.broker.kafka.clients import Consumer, GiveUp, make_consumer
from moebus.broker.kafka.config import KafkaConfig, reader_options
from moebus.broker.kafka.connector import Connector, close_quietly
from moebus.broker.kafka.convert import client_position, from_kafka, record_from, to_kafka, to_kafka_all
from moebus.broker.kafka.faults import Once, Pace, describe
from moebus.broker.kafka.mending import free_parked
from moebus.broker.ports import LogRecord, TopicPartition
from moebus.observability.log import get_logger

_log = get_logger(__name__)


class KafkaReader:
    """See `LogReader`. Connects in the background with its first poll.

    Positions and pauses are kept here: a consumer that fails is replaced and goes on where it was.
    """

    def __init__(self, config: KafkaConfig, name: str, max_wait: float = 0.5) -> None:
        def make(give_up: GiveUp) -> Consumer:
            options = reader_options(max_wait, config.request_timeout)
            return make_consumer(config, name, options, config.connect_timeout, give_up)

        self._name = name
        self._connector = Connector(name, make)
        self._positions: dict[TopicPartition, int] = {}
        self._paused: set[TopicPartition] = set()
        self._consumer: Consumer | None = None
        self._stale = True  # the consumer's assignment is not ours (yet)
        self._closed = False
        self._said = Once()
        self._pace = Pace()

    @property
    def closed(self) -> bool:
        return self._closed

    def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        for tp, offset in positions.items():
            _check(tp, offset)
        self._positions = dict(positions)
        self._paused &= set(positions)
        self._stale = True

    def position(self, tp: TopicPartition) -> int:
        if tp not in self._positions:
            raise ValueError(f"{tp} is not assigned to reader {self._name}")
        return self._positions[tp]

    def seek(self, tp: TopicPartition, offset: int) -> None:
        self.position(tp)
        _check(tp, offset)
        self._positions[tp] = offset
        if self._consumer is not None and not self._stale:
            self._consumer.seek(to_kafka(tp), offset)

    def pause(self, tps: Iterable[TopicPartition]) -> None:
        known = set(tps) & set(self._positions)
        self._paused |= known
        if self._consumer is not None and not self._stale:
            self._consumer.pause(*to_kafka_all(known))

    def resume(self, tps: Iterable[TopicPartition]) -> None:
        known = set(tps) & set(self._positions)
        self._paused -= known
        if self._consumer is not None and not self._stale:
            self._consumer.resume(*to_kafka_all(known))

    def poll(self, timeout: float, max_records: int = 500) -> list[LogRecord]:
        if self._closed:
            return []
        deadline = time.monotonic() + timeout
        if not self._pace.wait(timeout):
            return []
        consumer: Consumer | None = self._connector.get(timeout)
        if consumer is None:
            return []
        fresh = consumer is not self._consumer
        if fresh or self._stale:
            self._take_over(consumer)
        free_parked(consumer)
        left_ms = max(0.0, deadline - time.monotonic()) * 1000
        try:
            batches = consumer.poll(timeout_ms=left_ms, max_records=max_records)
        except (kafka_errors.OffsetOutOfRangeError, kafka_errors.LogTruncationError) as exc:
            raise self._out_of_range(exc) from exc
        except Exception as exc:  # whatever it is: the positions are ours, a new consumer goes on from them
            if not self._closed:
                self._replace(exc)
            return []
        self._pace.well()
        found = [record_from(record) for records in batches.values() for record in records]
        self._advance(consumer, found)
        return found

    def _take_over(self, consumer: Consumer) -> None:
        consumer.assign(to_kafka_all(self._positions))
        for tp, offset in self._positions.items():
            consumer.seek(to_kafka(tp), offset)
        consumer.resume(*to_kafka_all(set(self._positions) - self._paused))
        consumer.pause(*to_kafka_all(self._paused))
        self._consumer, self._stale = consumer, False

    def _advance(self, consumer: Consumer, found: list[LogRecord]) -> None:
        for record in found:
            self._positions[record.tp] = record.next_offset
        for tp, offset in self._positions.items():
            self._positions[tp] = max(offset, client_position(consumer, tp) or 0)

    def _out_of_range(self, exc: Exception) -> OffsetOutOfRange:
        named = getattr(exc, "divergent_offsets", None) or (exc.args[0] if exc.args else {})
        tp = next((from_kafka(one) for one in named), None) or next(iter(self._positions))
        return OffsetOutOfRange(tp.topic, tp.partition, self._positions.get(tp, -1))

    def _replace(self, exc: Exception) -> None:
        text = describe(exc)
        if self._said.worth(text):
            _log.warning("reader.replaced", f"reader {self._name} replaces its consumer: {text}")
        self._consumer, self._stale = None, True
        self._pace.failed()
        self._connector.drop()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            consumer = self._connector.close()
            if consumer is not None:
                close_quietly(consumer)


def _check(tp: TopicPartition, offset: int) -> None:
    if offset < 0:
        raise ValueError(f"{tp}: offset {offset} is negative")
