"""Records of other clients, and the life of a producer, on a real Kafka."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Protocol

import pytest

from moebus.broker import open_broker
from moebus.broker.errors import AdminRefused, AppendFailed, BrokerUnavailable
from moebus.broker.kafka import KafkaConfig
from moebus.broker.ports import Broker, OutRecord, TopicPartition
from tests.contract.log_world import put, read, values
from tests.support.wait import wait_until

pytestmark = pytest.mark.kafka


class _Kafka(Protocol):
    @property
    def bootstrap(self) -> str: ...


class NotUtf8(str):
    """A header name that kafka-python's producer writes as bytes that are not UTF-8."""

    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return b"\xff" + super().encode() + b"\xfe"


@pytest.fixture
def broker(kafka_broker: _Kafka) -> Iterator[Broker]:
    made = open_broker(kafka_broker.bootstrap)
    yield made
    made.close()


@pytest.fixture
def topic(broker: Broker, topic_prefix: str) -> str:
    name = f"{topic_prefix}.odd"
    assert broker.admin().create(name, partitions=1, replication=1, config={})
    return name


@pytest.fixture
def foreign(kafka_broker: _Kafka) -> Iterator[Any]:
    """A plain producer of another make, as far as our settings go: batches of several records, gzip."""
    from kafka import KafkaProducer

    producer = KafkaProducer(
        bootstrap_servers=kafka_broker.bootstrap, compression_type="gzip", linger_ms=50, metrics_enabled=False
    )
    yield producer
    producer.close(5)


def read_all(broker: Broker, topic: str, count: int) -> list[Any]:
    reader = broker.reader("r")
    reader.assign({TopicPartition(topic, 0): 0})
    return list(read(reader, count))


def test_header_names_that_are_not_utf8_stop_nobody(broker: Broker, topic: str, foreign: Any) -> None:
    names = ["plain", NotUtf8("odd"), "größe", NotUtf8(""), "last"]
    futures = [foreign.send(topic, b"%d" % n, headers=[(name, b"\xff")]) for n, name in enumerate(names)]
    for future in futures:
        future.get(10)
    found = read_all(broker, topic, 5)
    assert values(found) == [b"0", b"1", b"2", b"3", b"4"]
    assert [record.headers[0][0] for record in found] == ["plain", "\ufffdodd\ufffd", "größe", "\ufffd\ufffd", "last"]
    assert {record.headers[0][1] for record in found} == {b"\xff"}


def test_null_header_values_arrive_as_none(broker: Broker, topic: str, kafka_broker: _Kafka) -> None:
    confluent_kafka = pytest.importorskip("confluent_kafka")
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka_broker.bootstrap})
    producer.produce(topic, b"v", headers=[("a", None), ("a", b""), ("b", b"1")])
    producer.produce(topic, b"none")
    assert producer.flush(10) == 0
    found = read_all(broker, topic, 2)
    assert [record.headers for record in found] == [(("a", None), ("a", b""), ("b", b"1")), ()]


def test_compressed_batches_are_read(broker: Broker, topic: str, foreign: Any) -> None:
    for future in [foreign.send(topic, b"x" * 1000 + b"%d" % n) for n in range(50)]:
        future.get(10)
    assert values(read_all(broker, topic, 50)) == [b"x" * 1000 + b"%d" % n for n in range(50)]


def test_the_owner_hears_of_a_rebuilt_producer(broker: Broker, topic: str) -> None:
    broker.admin().set_config(topic, {"max.message.bytes": "2000"})
    rebuilt: list[str] = []
    writer = broker.writer("w", on_rebuild=rebuilt.append)
    put(writer, topic, [b"good"])
    assert isinstance(writer.append(OutRecord(topic, b"x" * 4000, b"k")).exception(30), AppendFailed)
    put(writer, topic, [b"good"])
    assert ["MessageSizeTooLargeError" in reason for reason in rebuilt] == [True]


def test_many_refused_records_among_many_good_ones(broker: Broker, topic: str) -> None:
    broker.admin().set_config(topic, {"max.message.bytes": "2000"})
    writer = broker.writer("w")
    bad = {3, 4, 30, 59}
    receipts = [
        writer.append(OutRecord(topic, b"%03d" % n + b"x" * (4000 if n in bad else 0), b"k")) for n in range(60)
    ]
    failed = {n for n, receipt in enumerate(receipts) if receipt.exception(60) is not None}
    assert failed == bad
    good = [b"%03d" % n for n in range(60) if n not in bad]
    assert list(dict.fromkeys(values(read_all(broker, topic, 56)))) == good


def test_the_reason_of_a_wrong_security_setting_is_told(kafka_broker: _Kafka) -> None:
    config = KafkaConfig(
        kafka_broker.bootstrap,
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="PLAIN",
        sasl_username="me",
        sasl_password="wrong-one",
    )
    with pytest.raises(BrokerUnavailable, match="IllegalSaslState") as caught:
        open_broker(config).admin().cluster_id(1.0)
    assert "wrong-one" not in str(caught.value)


def test_admin_refusals_are_not_outages(broker: Broker, topic: str) -> None:
    admin = broker.admin()
    with pytest.raises(AdminRefused, match="no-such-setting"):
        admin.set_config(topic, {"no-such-setting": "1"})
    with pytest.raises(AdminRefused, match="retention"):
        admin.set_config(topic, {"retention.ms": "soon"})
    with pytest.raises(AdminRefused):
        admin.create(f"{topic}.wide", partitions=1, replication=9, config={})
    with pytest.raises(AdminRefused):
        admin.create("not a name", partitions=1, replication=1, config={})


def test_nothing_is_left_after_close(kafka_broker: _Kafka, topic: str) -> None:
    before = set(threading.enumerate())
    broker = open_broker(KafkaConfig(kafka_broker.bootstrap))
    put(broker.writer("w"), topic, [b"v"])
    assert values(read_all(broker, topic, 1)) == [b"v"]
    member = broker.group_reader("m", f"{topic}-group", [topic])
    assert values(read(member, 1)) == [b"v"]
    assert broker.admin().broker_count() == 1
    broker.close()
    wait_until(lambda: set(threading.enumerate()) <= before, what="every thread to end")
