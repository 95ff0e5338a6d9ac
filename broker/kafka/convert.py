"""Between our values and kafka-python's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kafka.structs import TopicPartition as KafkaTopicPartition

from moebus.broker.kafka.clients import Consumer
from moebus.broker.ports import LogRecord, TopicPartition


def to_kafka(tp: TopicPartition) -> Any:
    return KafkaTopicPartition(tp.topic, tp.partition)


def to_kafka_all(tps: Iterable[TopicPartition]) -> list[Any]:
    return [to_kafka(tp) for tp in tps]


def from_kafka(tp: Any) -> TopicPartition:
    return TopicPartition(tp.topic, tp.partition)


def record_from(found: Any) -> LogRecord:
    """A consumer's record; headers become a tuple, their values stay bytes or None."""
    headers = tuple((name, value) for name, value in found.headers)
    return LogRecord(found.topic, found.partition, found.offset, found.timestamp, found.key, found.value, headers)


def client_position(consumer: Consumer, tp: TopicPartition) -> int | None:
    """Where the consumer reads on, also behind what compaction removed. Its own `position()` may ask the broker."""
    state = consumer._subscription.assignment.get(to_kafka(tp))
    return None if state is None or state.position is None else int(state.position.offset)
