"""No broker: nothing fails that could wait, what cannot wait says why within its time."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from moebus.broker import open_broker
from moebus.broker.errors import AppendUnknown, BrokerUnavailable, WriterClosed
from moebus.broker.ports import Broker, OutRecord, TopicPartition
from tests.support.wait import wait_until


@pytest.fixture
def closed_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def silent_port() -> Iterator[str]:
    """Accepts connections and never says anything."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("moebus-", "kafka-io"))]


@pytest.fixture
def broker(closed_port: str) -> Iterator[Broker]:
    made = open_broker(closed_port)
    yield made
    made.close()
    wait_until(lambda: not our_threads(), what="every thread to end")


def test_admin_names_the_address_and_the_reason(broker: Broker, closed_port: str) -> None:
    started = time.monotonic()
    with pytest.raises(
        BrokerUnavailable, match=rf"{closed_port} within 1 s .*ECONNREFUSED.*moebus broker up"
    ) as caught:
        broker.admin().cluster_id(1.0)
    assert time.monotonic() - started < 3.0
    assert caught.value.exit_code == 5


def test_the_reason_is_told_where_kafkas_logs_are_off(broker: Broker, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("kafka")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with pytest.raises(BrokerUnavailable, match="ECONNREFUSED"):
            broker.admin().cluster_id(0.5)
        assert [record.name for record in caplog.records if record.name.startswith("kafka.")] == []
    finally:
        logger.setLevel(before)


def test_a_port_that_never_answers(silent_port: str) -> None:
    broker = open_broker(silent_port)
    started = time.monotonic()
    with pytest.raises(BrokerUnavailable, match=silent_port):
        broker.admin().broker_count(1.0)
    assert time.monotonic() - started < 3.0
    broker.close()


def test_readers_keep_to_their_timeout(broker: Broker) -> None:
    reader = broker.reader("r")
    reader.assign({TopicPartition("t", 0): 5})
    member = broker.group_reader("m", "g", ["t"])
    for one in (reader, member):
        started = time.monotonic()
        assert one.poll(0.2) == []
        assert time.monotonic() - started < 1.0
    assert reader.position(TopicPartition("t", 0)) == 5


def test_writer_waits_until_the_deadline(broker: Broker) -> None:
    writer = broker.writer("w", receipt_timeout=0.3)
    receipt = writer.append(OutRecord("t", b"v", b"k"))
    assert not receipt.done()
    with pytest.raises(AppendUnknown, match="record for t: no ack before its deadline; it was never sent"):
        receipt.result(10)


def test_everything_closes_while_it_connects(silent_port: str) -> None:
    broker = open_broker(silent_port)
    receipt = broker.writer("w").append(OutRecord("t", b"v", b"k"))
    reader = broker.reader("r")
    reader.assign({TopicPartition("t", 0): 0})
    assert reader.poll(0.1) == []
    broker.group_reader("m", "g", ["t"])
    started = time.monotonic()
    broker.close()
    assert time.monotonic() - started < 3.0
    assert isinstance(receipt.exception(0), AppendUnknown)
    wait_until(lambda: not our_threads(), what="every thread to end")


def test_a_writer_made_before_a_fork_refuses_the_child(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = broker.writer("w")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(WriterClosed, match="fork"):
        writer.append(OutRecord("t", b"v", b"k"))
