"""`moebus doctor` on a real Kafka, and where there is none."""

from __future__ import annotations

import socket
import time

import pytest

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.topics import Topics, ensure
from moebus.consumers.control import ControlWorkerHost, WorkerSpec
from moebus.engine.simulated import SimulatedEngine
from moebus.observability.health import Health
from tests.support.cli import KafkaCli, run_command
from tests.support.wait import wait_until


@pytest.mark.kafka
def test_a_fleet_from_its_first_topic_to_its_first_worker(kafka_broker: LocalCluster, topic_prefix: str) -> None:
    cli, topics = KafkaCli(kafka_broker.bootstrap, topic_prefix), Topics(topic_prefix)
    ran = cli.run("doctor", "--json")
    missing = [line for line in ran.lines if line["status"] == "problem"]
    assert (ran.code, len(missing)) == (1, 5)
    assert {line["fix"] for line in missing} == {f"moebus --topic-prefix {topic_prefix} topics ensure"}

    broker, health = open_broker(kafka_broker.bootstrap), Health()
    ensure(broker.admin(), topics, routes_partitions=2)
    host = ControlWorkerHost(broker, topics, [WorkerSpec("w1", SimulatedEngine())], health=health).start()
    try:
        wait_until(lambda: health.ready() == {}, 60, "a ready worker")
        ran = cli.run("doctor", "--json")
        assert ran.code == 0, ran.out
        told = {line["check"]: line["message"] for line in ran.lines}
        assert told["topics"] == "5 of 5 topics are as defined"
        assert told["members"].startswith("1 workers and 0 stores are live")
        skew = int(told["clock"].split("clock is ")[1].split(" ms")[0])
        assert abs(skew) < 2_000, "one machine has one clock"
    finally:
        host.stop()
        broker.close()


@pytest.mark.parametrize("listens", [True, False])
def test_no_broker(monkeypatch: pytest.MonkeyPatch, listens: bool) -> None:
    """Nothing there, or something that never says a word."""
    monkeypatch.setattr("moebus.cli._doctor_broker.BROKER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        begun = time.monotonic()
        ran = run_command("--bootstrap-servers", f"127.0.0.1:{port}", "doctor", "--json")
        assert time.monotonic() - begun < 20
    assert ran.code == 5
    found = {line["check"]: line for line in ran.lines}
    assert found["broker"]["status"] == "problem"
    assert f"127.0.0.1:{port}" in found["broker"]["message"]
    assert {found[name]["status"] for name in ("topics", "clock", "members")} == {"skipped"}
    assert found["python"]["status"] == "ok"
