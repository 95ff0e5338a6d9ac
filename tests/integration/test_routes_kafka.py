"""Routes through the real Kafka: published by RoutingPublisher, streamed by a consumer group that rebalances."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.ports import Broker, TopicPartition
from moebus.broker.topics import Topics, ensure
from moebus.consumers.reader import RolloutStream, RoutingReader, StreamItem
from moebus.observability.settings import KafkaSettings
from moebus.producers.routing import RoutingPublisher
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.model_card import ModelCard
from tests.support.routes import make_routes
from tests.support.wait import wait_until

pytestmark = pytest.mark.kafka
CARD = ModelCard(num_experts=384, top_k=8, moe_layers=tuple(range(1, 13)))
ROLLOUTS = 200
PARTITIONS = 4


@pytest.fixture
def broker(kafka_broker: LocalCluster) -> Iterator[Broker]:
    opened = open_broker(KafkaSettings(bootstrap_servers=kafka_broker.bootstrap))
    yield opened
    opened.close()


@pytest.fixture
def topics(broker: Broker, topic_prefix: str) -> Topics:
    names = Topics(topic_prefix)
    admin = broker.admin()
    ensure(admin, names, routes_partitions=PARTITIONS)
    admin.close()
    return names


def rollout_id(number: int) -> str:
    return f"data{number % 50}:{number}:0:0"


class Member(threading.Thread):
    """Streams as a member of the group, acknowledging out of order, until it has enough or is told to stop."""

    def __init__(self, broker: Broker, topics: Topics, enough: int | None = None) -> None:
        super().__init__(daemon=True)
        self.got: dict[str, RouteArray] = {}
        self.stop = threading.Event()
        self.failure: Exception | None = None
        self.stream: RolloutStream | None = None
        self._reader = RoutingReader(broker, topics, run="run")
        self._enough = enough
        self._held: list[StreamItem] = []

    def run(self) -> None:
        try:
            with self._reader as reader:
                self.stream = reader.rollouts(group="trainer", idle_timeout=0.5)
                while not self.stop.is_set():
                    self._consume(self.stream)
        except Exception as exc:
            self.failure = exc

    def _consume(self, stream: RolloutStream) -> None:
        for item in stream:
            self.got[item.ref.rollout_id] = item.rollout.routes
            self._held.append(item)
            if self._enough is not None and len(self.got) >= self._enough:
                self.stop.set()
                break
            if len(self._held) == 5:
                self._ack()
        self._ack()

    def _ack(self) -> None:
        while self._held:
            self._held.pop().ack()

    def has_partitions(self) -> bool:
        return self.stream is not None and bool(self.stream.assignment())


def committed(broker: Broker, topics: Topics) -> bool:
    """Whether the group has committed the end of every partition."""
    admin, member = broker.admin(), broker.group_reader("check", "trainer", [topics.routes])
    ends = admin.end_offsets([TopicPartition(topics.routes, partition) for partition in range(PARTITIONS)])
    found = {tp: member.committed(tp) for tp in ends}
    member.close()
    admin.close()
    return found == ends


@pytest.mark.slow
def test_200_rollouts_are_streamed_whole_through_a_rebalance(broker: Broker, topics: Topics) -> None:
    sent = {rollout_id(i): make_routes(100 + 37 * i, CARD, seed=i) for i in range(ROLLOUTS)}
    names = list(sent)
    first, second = Member(broker, topics), Member(broker, topics, enough=20)
    with RoutingPublisher(broker, topics, run="run", card=CARD) as publisher:
        first.start()
        for name in names[:80]:
            publisher.submit(sent[name], name)
        wait_until(first.has_partitions, 30, "first member joined")
        second.start()  # joins, and leaves again after 20 rollouts: two rebalances in the middle
        for name in names[80:120]:
            publisher.submit(sent[name], name)
        wait_until(second.has_partitions, 30, "second member joined")
        for name in names[120:]:
            publisher.submit(sent[name], name)
        assert publisher.flush(60)
        assert publisher.stats().stored == ROLLOUTS
    wait_until(lambda: set(first.got) | set(second.got) == set(sent), 60, "all rollouts delivered")
    wait_until(lambda: committed(broker, topics), 30, "all offsets committed", step=0.5)
    first.stop.set()
    for member in (first, second):
        member.join(30)
        assert not member.is_alive()
        assert member.failure is None
        for name, routes in member.got.items():
            assert np.array_equal(routes, sent[name]), name
    assert len(second.got) == 20
