"""Bad input: answered `invalid` or dead-lettered with its reason, the process lives, the next record is served."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.ports import Broker, LogRecord, OutRecord, TopicPartition
from moebus.broker.topics import Topics, ensure
from moebus.producers.routing import RoutingPublisher
from tests.support.processes import Launcher, kcat, launcher
from tests.support.routes import CARD, make_routes
from tests.support.wait import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
GOLDEN = Path(__file__).parents[1] / "golden/record_v1/uint8_raw_chunk.bin"
UNREADABLE = {
    "not_json": b"{pause",
    "not_object": b'["pause"]',
    "no_request_id": b'{"method": "pause"}',
    "malformed id": b'{"request_id": 7, "method": "pause"}',
    "empty": b"",
}
REASON = {"malformed id": "no_request_id"}
INVALID: dict[str, dict[str, object]] = {
    "method": {"method": "explode", "args": {}},
    "tags": {"method": "sleep", "args": {"tags": ["disk"]}},
    "mode": {"method": "pause", "args": {"mode": "gently"}},
    "colour": {"method": "pause", "args": {"colour": "red"}},
    "deadline_s": {"method": "pause", "deadline_s": "soon"},
}


@pytest.fixture
def fleet(kafka_broker: LocalCluster, topic_prefix: str, tmp_path: Path) -> Iterator[Launcher]:
    with launcher(tmp_path, kafka_broker.bootstrap, topic_prefix) as made:
        assert made.run("topics", "ensure", "--json").returncode == 0
        yield made


@pytest.fixture
def broker(kafka_broker: LocalCluster) -> Iterator[Broker]:
    made = open_broker(kafka_broker.bootstrap)
    yield made
    made.close()


def read_all(broker: Broker, topic: str) -> list[LogRecord]:
    reader = broker.reader("test")
    try:
        reader.assign({TopicPartition(topic, 0): 0})
        found: list[LogRecord] = []
        while batch := reader.poll(1.0):
            found += batch
        return found
    finally:
        reader.close()


def answer_to(broker: Broker, topics: Topics, request_id: str) -> dict[str, object]:
    """The final answer to a request, as JSON."""

    def find() -> dict[str, object] | None:
        for record in read_all(broker, topics.control_responses):
            body = json.loads(record.value or b"{}")
            if body["request_id"] == request_id and body["phase"] == "done":
                return dict(body)
        return None

    found = wait_until(find, 30, f"an answer to {request_id}")
    assert found is not None
    return found


def test_bad_commands(fleet: Launcher, broker: Broker) -> None:
    topics = Topics(fleet.prefix)
    worker = fleet.worker("w1")
    worker.wait_log("service.ready")
    publish = ("-P", "-t", topics.control_requests)
    for value in UNREADABLE.values():
        # kcat sends the file as one record, also with 0 bytes
        writer = broker.writer("bad")
        writer.append(OutRecord(topics.control_requests, value)).result(10)
        writer.close(5)
    for field, body in INVALID.items():
        line = json.dumps({"request_id": f"bad-{field}", **body}).encode()
        kcat(fleet.bootstrap, *publish, stdin=line)
    kcat(fleet.bootstrap, *publish, stdin=b'{"request_id": "good", "method": "status", "args": {}}')

    assert answer_to(broker, topics, "good")["code"] == "ok"
    for field in INVALID:
        answer = answer_to(broker, topics, f"bad-{field}")
        assert (answer["code"], answer["error_code"]) == ("invalid", 400)
        assert field in str(answer["message"])
    letters = read_all(broker, topics.dlt)
    reasons = sorted(str((letter.header("reason") or b"").decode()) for letter in letters)
    assert reasons == sorted(REASON.get(kind, kind) for kind in UNREADABLE)
    assert sorted(letter.value or b"" for letter in letters) == sorted(UNREADABLE.values())
    assert worker.alive()


def test_a_command_above_the_size_limit_is_refused_before_it_is_sent(fleet: Launcher, broker: Broker) -> None:
    topics = Topics(fleet.prefix)
    big = {"request_id": "big", "method": "transfer_weights"}
    from moebus.producers.control import ControlClient
    from moebus.schemas.errors import MoebusError

    noise = "".join(uuid.uuid4().hex for _ in range(100_000))
    with ControlClient(broker, topics) as control, pytest.raises(MoebusError, match="args"):
        control.call(str(big["method"]), {"step": "update", "info": {"noise": noise}}, timeout=5)
    assert read_all(broker, topics.control_requests) == []


def test_bad_route_records(fleet: Launcher, broker: Broker) -> None:
    topics = Topics(fleet.prefix)
    store = fleet.store()
    store.wait_log("service.ready")
    good = GOLDEN.read_bytes()
    bad = {
        "empty": b"",
        "truncated": good[:-7],
        "checksum": good[:-1] + bytes([good[-1] ^ 1]),
        "magic": b"XXXX" + good[4:],
        "null": None,
    }
    writer = broker.writer("bad-routes")
    for value in bad.values():
        writer.append(OutRecord(topics.routes, value, key=b"k", partition=0)).result(10)
    writer.append(OutRecord(topics.routes, good, key=b"k", partition=0)).result(10)
    writer.close(5)

    wait_until(lambda: len(read_all(broker, topics.dlt)) >= 4, 30, "four dead letters")
    letters = read_all(broker, topics.dlt)
    assert {letter.value for letter in letters} >= {value for value in bad.values() if value}
    assert all(letter.header("reason") for letter in letters)
    # The next record is served: the store takes a whole rollout in and lists it.
    publisher = RoutingPublisher(broker, topics, run="r", card=CARD)
    publisher.submit(make_routes(5), "a:0:0:0").result(30)
    publisher.close(5)
    listed = wait_until(
        lambda: fleet.run("routes", "ls", "--run", "r", "--json").stdout, 30, "the rollout to be listed"
    )
    assert json.loads(listed.splitlines()[0])["id"] == "a:0:0:0"
    assert store.alive()


def test_ensure_again_changes_nothing(fleet: Launcher, broker: Broker) -> None:
    admin = broker.admin()
    reports = ensure(admin, Topics(fleet.prefix))
    assert {report.status for report in reports} == {"ok"}
