"""`moebus routes tail|verify|export|stats|plan` and `moebus dlt`, on a broker in memory with a real store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import LogRecord, OutRecord
from moebus.broker.topics import Topics, ensure
from moebus.consumers.dead_letters import dead_letter
from moebus.consumers.dlt import dead_letters
from moebus.producers import RoutingPublisher
from moebus.schemas import layouts
from moebus.schemas.record import Delete, encode
from tests.support.cli import KafkaCli, MemoryCli
from tests.support.routes import CARD, attempt_id, make_attempt, make_routes, make_tokens
from tests.support.store_http import serving
from tests.support.wait import wait_until

TOPICS = Topics("t")
RUN = ("--run", "run")


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    memory = MemoryBroker()
    ensure(memory.admin(), TOPICS, routes_partitions=3)
    yield memory
    memory.close()


@pytest.fixture
def cli(broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> MemoryCli:
    return MemoryCli(broker, "t", monkeypatch)


def publish(broker: MemoryBroker, ids: tuple[str, ...] = ("a:0:0:0", "a:1:0:0", "b/ä:0:0:0")) -> None:
    with RoutingPublisher(broker, TOPICS, run="run", card=CARD) as publisher:
        for seed, rollout_id in enumerate(ids):
            publisher.submit(make_routes(5, seed=seed), rollout_id, token_ids=make_tokens(6)).result(10)


@pytest.fixture
def stored(broker: MemoryBroker, cli: MemoryCli, tmp_path: Path) -> Iterator[MemoryCli]:
    """Three rollouts in a store."""
    publish(broker)
    with serving(broker, TOPICS, tmp_path / "store"):
        wait_until(lambda: len(cli.run("routes", "ls", *RUN, "--json").lines) == 3, 30, "three rollouts")
        yield cli


def test_tail_shows_every_record(broker: MemoryBroker, cli: MemoryCli) -> None:
    publish(broker)
    broker.writer("w").append(OutRecord(TOPICS.routes, b"rubbish", b"k", (), 1)).result(5)
    command = ("routes", "tail", *RUN, "--from-start", "--idle-timeout", "0.01")
    lines = cli.run(*command, "--json").lines
    assert sorted(one["kind"] for one in lines) == ["chunk"] * 3 + ["end"] * 3 + ["unreadable"]
    chunk = next(one for one in lines if one["kind"] == "chunk" and one["rollout_id"] == "b/ä:0:0:0")
    assert (chunk["run"], chunk["rows"], chunk["layers"], chunk["num_experts"]) == ("run", 5, [1, 2, 5], 16)
    text = cli.run(*command).out
    assert "run/a:1:0:0#0" in text
    assert "unreadable  magic" in text
    assert len(cli.run(*command, "--limit", "2", "--json").lines) == 2
    other = cli.run("routes", "tail", "--run", "other", "--from-start", "--idle-timeout", "0.01", "--json")
    assert [one["kind"] for one in other.lines] == ["unreadable"]
    last = cli.run("routes", "tail", *RUN, "--last", "1", "--idle-timeout", "0.01", "--json").lines
    assert {one["kind"] for one in last} <= {"end", "unreadable"}
    assert len(last) == len({one["position"].split("/")[1] for one in last})


def test_verify_says_what_is_right_and_what_is_not(stored: MemoryCli, tmp_path: Path) -> None:
    good = stored.run("routes", "verify", *RUN, "--json")
    assert good.code == 0
    assert good.lines == [{"checked": 3, "bad": 0, "bytes": 3 * 5 * 3 * 2}]
    assert stored.run("routes", "verify", "a", *RUN, "--json").lines[0]["checked"] == 2
    other = tmp_path / "card.json"
    other.write_text(json.dumps({"num_experts": 16, "top_k": 2, "moe_layers": [0, 1, 4]}))
    wrong = stored.run("routes", "verify", *RUN, "--model", str(other), "--json")
    assert wrong.code == 1
    assert wrong.lines[-1]["bad"] == 3
    assert "RouteCorrupt" in wrong.lines[0]["fault"]


def test_export_in_every_layout(stored: MemoryCli, tmp_path: Path) -> None:
    want = make_routes(5, seed=2)

    def exported(layout: str, *more: str) -> Path:
        folder = tmp_path / layout
        ran = stored.run("routes", "export", *RUN, "--layout", layout, "--out", str(folder), "--json", *more)
        assert ran.lines == [{"folder": str(folder), "layout": layout, "rollouts": 3}]
        listed = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
        return folder / str(next(one["file"] for one in listed if one["id"] == "b/ä:0:0:0"))

    assert np.array_equal(np.load(exported("npy")), want)
    assert np.array_equal(layouts.from_slime(np.load(exported("slime")), 16), want)
    assert np.array_equal(layouts.from_slime(np.load(exported("miles")), 16), want)
    assert np.array_equal(layouts.from_verl(np.load(exported("verl")), 16), want)
    padded = np.load(exported("fastdeploy", "--model-len", "8"))
    assert padded.shape == (3, 8, 2)
    assert np.array_equal(layouts.from_fastdeploy(padded, 16), want)
    text = exported("sglang", "--hidden-layers", "6").read_text()
    assert np.array_equal(layouts.from_sglang(text, CARD.moe_layers, 2, 16, 6), want)

    again = stored.run("routes", "export", *RUN, "--out", str(tmp_path / "npy"))
    assert again.code == 2
    assert "--out" in again.err
    assert stored.run("routes", "export", *RUN, "--layout", "sglang", "--out", str(tmp_path / "x")).code == 2
    assert not (tmp_path / "x").exists()


def test_stats_of_every_partition(stored: MemoryCli) -> None:
    lines = stored.run("routes", "stats", "--json").lines
    assert [one["partition"] for one in lines] == [0, 1, 2]
    assert sum(one["rollouts"] for one in lines) == 3
    assert all(one["lag"] == 0 for one in lines)
    runs = [held for one in lines for held in one["runs"]]
    assert {held["run"] for held in runs} == {RUN[1]}
    assert all(held["used_bytes"] > 0 and held["quota_bytes"] is None and held["card"] == CARD.digest for held in runs)
    shown = stored.run("routes", "stats").out
    assert "follows" in shown
    assert RUN[1] in shown


def test_stats_without_a_store(cli: MemoryCli) -> None:
    ran = cli.run("routes", "stats")
    assert ran.code == 1
    assert "no live store" in ran.err


def test_plan_needs_no_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cli = MemoryCli(MemoryBroker(), "t", monkeypatch)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}')
    given = ("routes", "plan", "--model", str(tmp_path), "--rollouts", "1536", "--tokens", "32769")
    plan = cli.run(*given, "--json").lines[0]
    assert (plan["token"], plan["rollout"], plan["partitions"]) == (384, 12 << 20, 8)
    assert "a step" in cli.run(*given).out
    assert "too slow" in cli.run(*given, "--step-seconds", "60").out
    missing = cli.run("routes", "plan", "--model", str(tmp_path / "no"), "--rollouts", "1", "--tokens", "1")
    assert missing.code == 2
    assert "--model" in missing.err


class Quarantine:
    """Dead letters of a command, a delete, a chunk, one cut short, and one of another fleet."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.chunk = make_attempt(run="run").chunks[0]
        self.writer = broker.writer("w")
        self.command = self.add(TOPICS.control_requests, b'{"method": "pause"}', "no_request_id")
        self.fence = self.add(TOPICS.routes, encode(Delete("run", "a", attempt_id(1))), "odd")
        self.route = self.add(TOPICS.routes, self.chunk, "base_not_held", key=b"run/a")
        self.cut = self.add(TOPICS.routes, bytes(890_000), "magic")
        self.stranger = self.add("other.routes.v1", self.chunk, "odd")

    def add(self, topic: str, value: bytes, reason: str, key: bytes | None = None) -> str:
        number = 0 if topic == TOPICS.control_requests else 2
        original = LogRecord(topic, number, len(value), 7, key, value)
        self.writer.append(dead_letter(original, TOPICS.dlt, reason, "a sentence", "test")).result(5)
        return str(original)


@pytest.fixture
def letters(broker: MemoryBroker) -> Quarantine:
    return Quarantine(broker)


def test_dead_letters_are_listed_and_shown(letters: Quarantine, cli: MemoryCli, tmp_path: Path) -> None:
    lines = cli.run("dlt", "ls", "--json").lines
    assert [one["position"] for one in lines] == [
        letters.command, letters.fence, letters.route, letters.cut, letters.stranger,
    ]  # fmt: skip
    assert [one["truncated"] for one in lines] == [False, False, False, True, False]
    assert cli.run("dlt", "ls", "--reason", "magic", "--json").lines[0]["bytes"] == 890_000
    assert len(cli.run("dlt", "ls", "--topic", "control", "--json").lines) == 1
    assert "not shown" in cli.run("dlt", "ls", "--limit", "2").out

    out = tmp_path / "record.bin"
    shown = cli.run("dlt", "show", letters.route, "--out", str(out), "--json").lines[0]
    assert (shown["nature"], shown["reason"], shown["key"]) == ("route", "base_not_held", "run/a")
    assert shown["content"]["kind"] == "chunk"
    assert out.read_bytes() == letters.chunk
    assert cli.run("dlt", "show", letters.command, "--json").lines[0]["content"] == {"method": "pause"}
    assert "no dead letter" in cli.run("dlt", "show", "t.routes.v1/0/1").err
    assert cli.run("dlt", "show", "nonsense").code == 2


def test_the_same_original_put_aside_twice_is_one(broker: MemoryBroker, letters: Quarantine) -> None:
    before = len(dead_letters(broker, TOPICS))
    letters.add(TOPICS.routes, letters.chunk, "again", key=b"run/a")
    found = dead_letters(broker, TOPICS)
    assert len(found) == before
    assert found[-1].reason == "again"


def values(broker: MemoryBroker, topic: str) -> list[bytes | None]:
    return [record.value for log in broker.cluster.topics[topic].logs for record in log.records]


def test_replay_sends_the_original_bytes(broker: MemoryBroker, letters: Quarantine, cli: MemoryCli) -> None:
    dry = cli.run("dlt", "replay", letters.route, "--dry-run", "--json")
    assert (dry.code, dry.lines[0]["outcome"]) == (0, "would_send")
    assert values(broker, TOPICS.routes) == []
    sent = cli.run("dlt", "replay", letters.route, "--json")
    assert sent.lines[0]["sent_to"] == "t.routes.v1/2/0"
    record = broker.cluster.topics[TOPICS.routes].logs[2].records[0]
    assert (record.key, record.value) == (b"run/a", letters.chunk)
    assert record.header("correlation-id") == letters.route.encode()


def test_what_takes_effect_needs_force(broker: MemoryBroker, letters: Quarantine, cli: MemoryCli) -> None:
    for position in (letters.command, letters.fence):
        refused = cli.run("dlt", "replay", position)
        assert refused.code == 2
        assert "--force" in refused.err
        assert cli.run("dlt", "replay", position, "--dry-run", "--json").lines[0]["outcome"] == "refused"
    assert values(broker, TOPICS.control_requests) == []
    assert values(broker, TOPICS.routes) == []
    assert cli.run("dlt", "replay", letters.command, letters.fence, "--force").code == 0
    assert values(broker, TOPICS.control_requests) == [b'{"method": "pause"}']
    assert len(values(broker, TOPICS.routes)) == 1


def test_some_are_never_sent(letters: Quarantine, cli: MemoryCli) -> None:
    cut = cli.run("dlt", "replay", letters.cut, "--force")
    assert (cut.code, "890000" in cut.err) == (2, True)
    assert "no topic of this fleet" in cli.run("dlt", "replay", letters.stranger, "--force").err
    everything = cli.run("dlt", "replay", "--all", "--json")
    assert everything.code == 3  # the route went, the others were refused
    assert [one["outcome"] for one in everything.lines].count("sent") == 1
    assert cli.run("dlt", "replay").code == 2
    assert cli.run("dlt", "replay", letters.route, "--all").code == 2


@pytest.mark.parametrize("name", ["tail", "stats", "verify", "export", "plan"])
def test_help_teaches(cli: MemoryCli, name: str) -> None:
    ran = cli.run("routes", name, "--help")
    assert (ran.code, "Example: " in ran.out, "--json" in ran.out) == (0, True, True)


@pytest.mark.parametrize("name", ["ls", "show", "replay"])
def test_help_of_dead_letters_teaches(cli: MemoryCli, name: str) -> None:
    ran = cli.run("dlt", name, "--help")
    assert (ran.code, "Example: " in ran.out, "--json" in ran.out) == (0, True, True)


@pytest.mark.kafka
def test_tail_and_dead_letters_on_kafka(kafka_broker: LocalCluster, topic_prefix: str, tmp_path: Path) -> None:
    """Null headers, offsets and gaps are the real one's."""
    real = KafkaCli(kafka_broker.bootstrap, topic_prefix)
    topics = Topics(topic_prefix)
    broker = open_broker(kafka_broker.bootstrap)
    ensure(broker.admin(), topics, routes_partitions=2)
    chunk = make_attempt(run="run").chunks[0]
    with RoutingPublisher(broker, topics, run="run", card=CARD) as publisher:
        publisher.submit(make_routes(5), "a:0:0:0").result(30)
        publisher.delete("b").result(30)
    kinds = [one["kind"] for one in real.run("routes", "tail", *RUN, "--last", "9", "--limit", "4", "--json").lines]
    assert sorted(kinds) == ["chunk", "delete", "delete", "end"]
    writer = broker.writer("w")
    for key in (None, b"run/a"):
        original = LogRecord(topics.routes, 1, 70 + bool(key), 7, key, chunk)
        writer.append(dead_letter(original, topics.dlt, "odd", "why", "test")).result(30)
    assert [one["key"] for one in real.run("dlt", "ls", "--json").lines] == [None, "run/a"]
    sent = real.run("dlt", "replay", "--all", "--json").lines
    assert [one["sent_to"].rsplit("/", 1)[0] for one in sent] == [f"{topics.routes}/1"] * 2
    last = real.run("routes", "tail", *RUN, "--from-start", "--idle-timeout", "5", "--limit", "6", "--json").lines
    assert sorted(one["kind"] for one in last) == ["chunk"] * 3 + ["delete"] * 2 + ["end"]
    broker.close()
