"""One producer: sending, and ending it for good, whatever state it is in."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import count
from typing import Any

from kafka import errors as kafka_errors

from moebus.broker.errors import AppendFailed
from moebus.broker.kafka.clients import NULL_VALUE, Producer
from moebus.broker.kafka.faults import describe
from moebus.broker.kafka.outbox import Entry
from moebus.broker.partitioner import partition_for

Acked = Callable[[Entry, Any], None]
Failed = Callable[["Link", Entry, Exception], None]


class TopicUnknown(Exception):
    """The cluster does not tell anything about the topic (yet)."""


class ProducerBroken(Exception):
    """The producer takes nothing any more."""


class Link:
    """`acked(entry, metadata)` and `failed(link, entry, error)` are called on the producer's thread."""

    def __init__(self, producer: Producer, acked: Acked, failed: Failed) -> None:
        self._producer = producer
        self._acked = acked
        self._failed = failed
        self._unkeyed = count()

    def send(self, entry: Entry) -> None:
        """Hands a record over; does not wait for its ack.

        Raises:
            AppendFailed: this record can never be sent.  TopicUnknown: try again later.  ProducerBroken.
        """
        record = entry.record
        if entry.partition is None:
            entry.partition = self._choose(entry)
        try:
            future = self._producer.send(
                record.topic,
                value=NULL_VALUE if record.value is None else record.value,
                key=record.key,
                headers=[(name, value or b"") for name, value in record.headers],
                partition=entry.partition,
            )
        except kafka_errors.IllegalStateError as exc:
            raise ProducerBroken(describe(exc)) from exc
        except kafka_errors.KafkaTimeoutError as exc:
            raise TopicUnknown(f"no topic {record.topic}") from exc
        except (kafka_errors.KafkaError, ValueError, TypeError) as exc:
            raise AppendFailed(f"record for {record.topic}: {describe(exc)}") from exc
        future.add_callback(lambda metadata: self._acked(entry, metadata))
        future.add_errback(lambda error: self._failed(self, entry, error))

    def _choose(self, entry: Entry) -> int:
        record = entry.record
        partitions = self._partitions(record.topic)
        if record.key is not None:
            return partition_for(record.key, partitions)
        return next(self._unkeyed) % partitions

    def _partitions(self, topic: str) -> int:
        try:
            return len(self._producer.partitions_for(topic))
        except kafka_errors.KafkaTimeoutError as exc:
            raise TopicUnknown(f"no topic {topic}") from exc
        except kafka_errors.KafkaError as exc:
            raise AppendFailed(f"record for {topic}: {describe(exc)}") from exc

    def end(self, patience: float) -> None:
        """Ends the producer within about `patience` seconds and a little; what it still held fails."""
        # `close` flushes first, and raises without closing when that takes too long.
        self._producer.flush = lambda timeout=None: None
        with contextlib.suppress(Exception):
            if patience <= 0:
                self._producer._sender.force_close()
            self._producer.close(timeout=max(patience, 1.0))
        with contextlib.suppress(Exception):
            self._producer._sender.join(1.0)
