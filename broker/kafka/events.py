"""Rebalance events of a group member: heard on kafka-python's IO thread, told on the thread that polls."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple

from kafka import ConsumerRebalanceListener

from moebus.broker.kafka.clients import Consumer
from moebus.broker.kafka.convert import from_kafka
from moebus.broker.kafka.mending import forget_assignment
from moebus.broker.ports import TopicPartition


class Event(NamedTuple):
    """`assigned`: these partitions came; otherwise they went."""

    assigned: bool
    tps: tuple[TopicPartition, ...]


class EventQueue(ConsumerRebalanceListener):  # type: ignore[misc]
    """Collects; calls nobody. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._consumer: Consumer | None = None

    def follow(self, consumer: Consumer) -> None:
        """Names the consumer that the events are about."""
        self._consumer = consumer

    def on_partitions_assigned(self, assigned: Any) -> None:
        self._put(True, assigned)

    def on_partitions_revoked(self, revoked: Any) -> None:
        self._put(False, revoked)
        if self._consumer is not None:
            forget_assignment(self._consumer)

    def on_partitions_lost(self, lost: Any) -> None:
        self._put(False, lost)

    def _put(self, assigned: bool, tps: Any) -> None:
        event = Event(assigned, tuple(sorted(from_kafka(tp) for tp in tps)))
        if event.tps:
            with self._lock:
                self._events.append(event)

    def take(self) -> list[Event]:
        with self._lock:
            events = list(self._events)
            self._events.clear()
            return events

    def going(self) -> frozenset[TopicPartition]:
        """Partitions that were taken away and not told of yet."""
        with self._lock:
            return frozenset(tp for event in self._events if not event.assigned for tp in event.tps)
