"""The Kafka adapter passes the contract, on a real Apache Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Protocol
from uuid import uuid4

import pytest

from moebus.broker import open_broker
from moebus.broker.kafka import KafkaConfig
from moebus.broker.local import LocalCluster
from moebus.broker.ports import TopicPartition
from moebus.broker.topics import Topics, ensure
from moebus.producers.control import ControlClient
from tests.contract.broker_suite import BrokerSuite, OutageSuite, RestartSuite
from tests.contract.log_world import FragileWorld, World
from tests.support.background import Background
from tests.support.wait import wait_until

pytestmark = pytest.mark.kafka


class _Kafka(Protocol):
    @property
    def bootstrap(self) -> str: ...


class KafkaWorld:
    """Fresh names on a shared cluster."""

    def __init__(self, config: KafkaConfig) -> None:
        self.config = config
        self.broker = open_broker(config)
        self._prefix = f"contract-{uuid4().hex[:12]}"
        self._numbers = count()

    def free_name(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"

    def topic(self, partitions: int = 1, **config: str) -> str:
        name = self.free_name()
        settings = {"message.timestamp.type": "LogAppendTime"}
        settings |= {key.replace("_", "."): value for key, value in config.items()}
        assert self.broker.admin().create(name, partitions=partitions, replication=1, config=settings, timeout=30)
        return name

    def truncate(self, tp: TopicPartition, offset: int) -> None:
        with _admin_client(self.config) as client:
            client.delete_records({_kafka_tp(tp): offset})

    def delete_topic(self, name: str) -> None:
        with _admin_client(self.config) as client:
            client.delete_topics([name])
        wait_until(lambda: not self.broker.admin().describe([name]), what="the topic to be gone")


class FragileKafkaWorld(KafkaWorld):
    """A cluster of its own, which is frozen (no answer) or killed (connections refused)."""

    def __init__(self, config: KafkaConfig, cluster: LocalCluster, *, frozen: bool) -> None:
        super().__init__(config)
        self._cluster = cluster
        self._frozen = frozen

    @contextmanager
    def _hurt(self) -> Iterator[None]:
        if self._frozen:
            self._cluster.freeze()
        else:
            self._cluster.kill()
        try:
            yield
        finally:
            if self._frozen:
                self._cluster.thaw()
            else:
                self._cluster.restart()

    def outage(self) -> AbstractContextManager[None]:
        return self._hurt()


def _kafka_tp(tp: TopicPartition) -> object:
    from kafka.structs import TopicPartition as KafkaTopicPartition

    return KafkaTopicPartition(*tp)


@contextmanager
def _admin_client(config: KafkaConfig):  # type: ignore[no-untyped-def]  # kafka-python has no types
    from moebus.broker.kafka.clients import make_admin

    client = make_admin(config, 10)
    try:
        yield client
    finally:
        client.close()


@pytest.fixture
def world(kafka_broker: _Kafka) -> Iterator[World]:
    made = KafkaWorld(KafkaConfig(kafka_broker.bootstrap))
    yield made
    made.broker.close()


class TestKafkaBroker(BrokerSuite):
    """Contract without an outage."""


@pytest.fixture(scope="module")
def fragile_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster.start(tmp_path_factory.mktemp("fragile-kafka"), die_with_parent=True) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestFrozenKafka(OutageSuite, RestartSuite):
    """Contract of outages: the broker keeps its connections and answers nothing."""

    REQUEST_TIMEOUT = 1.0

    @pytest.fixture
    def world(self, fragile_cluster: LocalCluster) -> Iterator[FragileWorld]:
        yield from fragile_world(fragile_cluster, self.REQUEST_TIMEOUT, frozen=True)


@pytest.mark.slow
@pytest.mark.timeout(300)
class TestKilledKafka(RestartSuite):
    """Contract of outages: the broker is killed and started again."""

    REQUEST_TIMEOUT = 1.0

    @pytest.fixture
    def world(self, fragile_cluster: LocalCluster) -> Iterator[FragileWorld]:
        yield from fragile_world(fragile_cluster, self.REQUEST_TIMEOUT, frozen=False)

    def test_questions_outlast_a_restart(self, world: FragileWorld) -> None:
        """A restart shorter than the timeout: an admin, and a controller's look at its fleet, answer late and right."""
        admin, topics = world.broker.admin(), Topics(world.free_name())
        ensure(admin, topics)
        tp = TopicPartition(topics.members, 0)
        with ControlClient(world.broker, topics, connect_timeout=60) as control:
            assert control.members() == []
            with world.outage():
                end = Background(lambda: admin.end_offsets([tp], 60))
                members = Background(control.members)
            assert end.result(60)[tp] >= 1, "the probe of the broker's time"
            assert members.result(60) == []


def fragile_world(cluster: LocalCluster, request_timeout: float, *, frozen: bool) -> Iterator[FragileWorld]:
    made = FragileKafkaWorld(KafkaConfig(cluster.bootstrap, request_timeout=request_timeout), cluster, frozen=frozen)
    yield made
    made.broker.close()
