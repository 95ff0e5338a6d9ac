"""Routes through the real Kafka: published by RoutingPublisher, streamed by a consumer group that rebalances."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.ports import Broker
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


@pytest.fixture
def broker(kafka_broker: LocalCluster) -> Iterator[Broker]:
    opened = open_broker(KafkaSettings(bootstrap_servers=kafka_broker.bootstrap))
    yield opened
    opened.close()


@pytest.fixture
def topics(broker: Broker, topic_prefix: str) -> Topics:
    names = Topics(topic_prefix)
    admin = broker.admin()
    ensure(admin, names, routes_partitions=4)
    admin.close()
    return names


def rollout_id(number: int) -> str:
    return f"data{number % 50}:{number}:0:0"


class Member(threading.Thread):
    """Streams as a member of the group, acknowledging out of order, until it has enough or nothing comes for a while."""

    def __init__(self, broker: Broker, topics: Topics, enough: int | None = None) -> None:
        super().__init__(daemon=True)
        self.got: dict[str, RouteArray] = {}
        self.failure: Exception | None = None
        self.stream: RolloutStream | None = None
        self._reader = RoutingReader(broker, topics, run="run")
        self._enough = enough

    def run(self) -> None:
        try:
            with self._reader as reader:
                self.stream = reader.rollouts(group="trainer", idle_timeout=6)
                self._consume(self.stream)
        except Exception as exc:
            self.failure = exc

    def _consume(self, stream: RolloutStream) -> None:
        held: list[StreamItem] = []
        for item in stream:
            self.got[item.ref.rollout_id] = item.rollout.routes
            held.append(item)
            enough = self._enough is not None and len(self.got) >= self._enough
            if len(held) == 5 or enough:
                while held:
                    held.pop().ack()
            if enough:
                return
        while held:
            held.pop().ack()

    def has_partitions(self) -> bool:
        return self.stream is not None and bool(self.stream.assignment())


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
    for member in (first, second):
        member.join(90)
        assert not member.is_alive()
        assert member.failure is None
    assert len(second.got) == 20
    got = {**first.got, **second.got}
    assert set(got) == set(sent)
    for name, routes in sent.items():
        for member in (first, second):
            assert name not in member.got or np.array_equal(member.got[name], routes)
    late = Member(broker, topics)
    late.run()
    assert late.failure is None
    assert late.got == {}, "everything was acknowledged and committed"
