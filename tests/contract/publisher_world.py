"""What the contract of a publisher needs: a log, publishers on it, and a look at what arrived."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import Broker, LogRecord, TopicPartition
from moebus.broker.topics import Topics
from moebus.observability.clock import Clock, SystemClock
from moebus.observability.metrics import Metrics
from moebus.observability.settings import PublisherSettings
from moebus.producers.routing import RoutingPublisher
from moebus.producers.routing.jobs import Wire
from moebus.producers.routing.process.place import open_place
from moebus.producers.routing.process.sender import ProcessSender
from moebus.producers.routing.sender import Sender
from moebus.producers.routing.stats import Counters
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import End, Record, decode
from tests.support.child_thread import ChildThread
from tests.support.routes import CARD

PARTITIONS = 4
WAIT = 30.0


class PublisherWorld(Protocol):
    """One log; `make` gives publishers for run `run`."""

    def make(
        self,
        metrics: Metrics | None = None,
        *,
        card: ModelCard | None = CARD,
        on_high_water: Callable[[int, int], object] | None = None,
        **options: object,
    ) -> RoutingPublisher: ...

    def records(self) -> list[LogRecord]:
        """Everything in the routes topic, by partition and offset."""
        ...

    def outage(self) -> AbstractContextManager[None]:
        """Nobody answers inside the block."""
        ...


def read_all(broker: Broker, topics: Topics) -> list[LogRecord]:
    """Everything in the routes topic, by partition and offset."""
    reader, admin = broker.reader("check"), broker.admin()
    ends = admin.end_offsets([TopicPartition(topics.routes, p) for p in range(PARTITIONS)])
    admin.close()
    reader.assign(dict.fromkeys(ends, 0))
    found: list[LogRecord] = []
    while len(found) < sum(ends.values()):
        found += reader.poll(1.0)
    reader.close()
    return sorted(found, key=lambda record: (record.partition, record.offset))


def decoded(world: PublisherWorld) -> list[Record]:
    return [decode(record.value) for record in world.records()]


def end_of(record: LogRecord) -> End:
    end = decode(record.value)
    assert isinstance(end, End)
    return end


class MemoryWorld:
    """A thread that sends, on the log in memory."""

    topics = Topics("t")

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.broker = MemoryBroker()
        self.broker.create(self.topics.routes, PARTITIONS)

    def make(
        self,
        metrics: Metrics | None = None,
        *,
        card: ModelCard | None = CARD,
        on_high_water: Callable[[int, int], object] | None = None,
        **options: object,
    ) -> RoutingPublisher:
        return RoutingPublisher(
            self.broker,
            self.topics,
            run="run",
            card=card,
            options=PublisherSettings.model_validate({"max_bytes": 16 << 20, **options}),
            metrics=metrics,
            clock=self.clock,
            make_sender=self._sender(),
            on_high_water=on_high_water,
        )

    def _sender(self) -> Callable[..., Sender] | None:
        return None

    def records(self) -> list[LogRecord]:
        return read_all(self.broker, self.topics)

    def outage(self) -> AbstractContextManager[None]:
        return self.broker.outage()


class JournalWorld(MemoryWorld):
    """Everything of the publisher with a process of its own but the process: its child runs in a thread."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.children: list[ChildThread] = []

    def _sender(self) -> Callable[..., Sender]:
        def make(
            wire: Wire,
            options: PublisherSettings,
            clock: Clock,
            metrics: Metrics,
            counters: Counters,
            on_used: Callable[[int], None],
        ) -> Sender:
            place = open_place(options.journal, options.max_bytes, clock)

            def spawn() -> ChildThread:
                self.children.append(ChildThread(place.fd, self.broker, wire, clock, options.receipt_timeout))
                return self.children[-1]

            return ProcessSender(place, spawn, options, clock, metrics, counters, on_used)

        return make
