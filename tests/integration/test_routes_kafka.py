"""Routes through the real Kafka: published, stored, resolved, deleted, and streamed by a group that rebalances."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.ports import Broker, TopicPartition
from moebus.broker.topics import Topics, ensure
from moebus.cli.main import app
from moebus.consumers.reader import RolloutStream, RoutingReader, StreamItem
from moebus.observability.settings import KafkaSettings
from moebus.producers.routing import RoutingPublisher
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.model_card import ModelCard
from tests.support.routes import make_routes, make_tokens
from tests.support.store_http import serving
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


def run_cli(broker: LocalCluster, topics: Topics, *arguments: str, code: int = 0) -> str:
    """`moebus ... routes ARGUMENTS` in this process; what it printed on stdout (on stderr where `code` is not 0)."""
    options = ["--bootstrap-servers", broker.bootstrap, "--topic-prefix", topics.prefix]
    logger = logging.getLogger("moebus")
    before = logger.handlers[:], logger.level, logger.propagate
    try:
        result = CliRunner().invoke(app, [*options, "routes", *arguments])
    finally:  # a command sends the logs to its own stderr
        logger.handlers[:], logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def test_resolve_delete_and_the_commands_through_a_real_store(
    kafka_broker: LocalCluster, broker: Broker, topics: Topics, tmp_path: Path
) -> None:
    ids = ["a:1:0:0", "a:1:1:0", "a:10:0:0", "b"]
    sent = {name: make_routes(300 + i, CARD, seed=i) for i, name in enumerate(ids)}
    with (
        serving(broker, topics, tmp_path / "store"),
        RoutingPublisher(broker, topics, run="run", card=CARD) as publisher,
        RoutingReader(broker, topics, run="run", card=CARD) as reader,
    ):
        tokens = [make_tokens(len(routes) + 1, seed=i) for i, routes in enumerate(sent.values())]
        refs = [publisher.submit(sent[name], name, token_ids=ids_).ref for name, ids_ in zip(ids, tokens, strict=True)]
        batch = reader.resolve(refs, tokens, wait=60)  # finds the store in members on its way
        for i, routes in enumerate(sent.values()):
            first = int(batch.cu_seqlens[i])
            assert np.array_equal(batch.routes[first : first + len(routes)], routes)
        assert int(batch.valid.sum()) == len(batch.valid) - len(ids)
        run = ("--run", "run")
        listed = [json.loads(line) for line in run_cli(kafka_broker, topics, "ls", "a", *run, "--json").splitlines()]
        assert [entry["id"] for entry in listed] == sorted(ids[:3])
        first_page = run_cli(kafka_broker, topics, "ls", *run, "--limit", "3", "--json").splitlines()
        cursor = json.loads(first_page[-1])["after"]
        assert "b" in run_cli(kafka_broker, topics, "ls", *run, "--after", cursor)
        file = tmp_path / "routes.npy"
        shown = json.loads(run_cli(kafka_broker, topics, "get", "a:1:1:0", *run, "--json", "--out", str(file)))
        assert (shown["shape"], shown["status"]) == ([301, 12, 8], "complete")
        assert np.array_equal(np.load(file, allow_pickle=False), sent["a:1:1:0"])
        assert "most loaded" in run_cli(kafka_broker, topics, "get", "b", *run)
        assert "needed where nobody can be asked" in run_cli(kafka_broker, topics, "rm", "a:1", *run, code=2)
        gone = json.loads(run_cli(kafka_broker, topics, "rm", "a:1", *run, "--yes", "--json"))
        assert len(gone["offsets"]) == PARTITIONS
        wait_until(lambda: not reader.exists("a:1:1:0"), 30, "the delete")
        assert [reader.exists(name) for name in ids] == [False, False, True, True]
        assert "deleted by prefix" in run_cli(kafka_broker, topics, "get", "a:1:0:0", *run, code=1)


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
