"""The control worker on the real Kafka: a bare command, a full loop, a crash and the successor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.ports import Broker, OutRecord
from moebus.broker.topics import Topics, ensure
from moebus.consumers.control import ControlWorkerHost, WorkerSpec
from moebus.engine.simulated import SimulatedEngine
from moebus.producers.control import ControlClient, FleetTimeout
from moebus.schemas.responses import Code
from moebus.schemas.tags import Tag
from tests.support.control_lab import Crash, CrashAt
from tests.support.processes import launcher
from tests.support.wait import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


@pytest.fixture
def broker(kafka_broker: LocalCluster) -> Iterator[Broker]:
    opened = open_broker(kafka_broker.bootstrap)
    yield opened
    opened.close()


def ready(client: ControlClient, boot: str | None = None) -> bool:
    return any(w.live and w.state.ready and w.state.boot_id != boot for w in client.workers())


def test_a_crash_after_the_effect_and_the_successor(broker: Broker, topic_prefix: str, tmp_path: Path) -> None:
    topics = Topics(topic_prefix)
    ensure(broker.admin(), topics)
    source = tmp_path / "v2.safetensors"
    source.write_bytes(b"weights")
    engine = SimulatedEngine(allowed_roots=[str(tmp_path)])
    fault = CrashAt("after_effect")
    first = ControlWorkerHost(broker, topics, [WorkerSpec("w1", engine)], fault=fault, grace=1.0).start()
    with ControlClient(broker, topics, issuer="test") as client:
        wait_until(lambda: ready(client), 30, "ready")
        writer = broker.writer("bare")
        bare = b'{"request_id": "control-1", "method": "sleep", "args": {"tags": "kv_cache"}}'
        writer.append(OutRecord(topics.control_requests, bare)).result(10)
        wait_until(lambda: not engine.inspect().resident[Tag.KV_CACHE], 10, "the bare command")
        fault.armed = True
        with pytest.raises(FleetTimeout):
            client.wakeup(request_id="w", timeout=2)
        wait_until(lambda: not first.alive, 20, "the crash")
        assert isinstance(first.error, Crash)
        second = ControlWorkerHost(broker, topics, [WorkerSpec("w1", engine)]).start()
        try:
            wait_until(lambda: ready(client, first.boot_id), 40, "the successor")
            assert client.operation("w").responses["w1"].message == "completed after a restart"
            outcome = client.update_weights("v2", source=str(source))
            assert outcome.responses["w1"].code is Code.OK
            assert client.resume().ok
            assert (engine.inspect().version, engine.inspect().paused) == ("v2", False)
        finally:
            second.stop()
        assert second.error is None
        assert client.workers() == [] or not client.workers()[0].live


def test_two_processes_under_one_id_and_the_trace_when_all_are_gone(
    broker: Broker, kafka_broker: LocalCluster, topic_prefix: str, tmp_path: Path
) -> None:
    """The older process ends with a code of its own; what was done can be read from the topics, by anybody, later."""
    topics = Topics(topic_prefix)
    ensure(broker.admin(), topics)
    with launcher(tmp_path, kafka_broker.bootstrap, topic_prefix) as processes:
        with ControlClient(broker, topics, issuer="trainer") as client:
            old = processes.worker("w1")
            wait_until(lambda: ready(client), 60, "ready")
            boot = client.workers()[0].state.boot_id
            assert client.pause(request_id="p-1").ok
            new = processes.worker("w1")
            assert old.wait_exit(60) == 6
            assert "worker w1 was started again elsewhere" in old.text()
            wait_until(lambda: ready(client, boot), 60, "the newer process is ready")
            slept = client.sleep(["kv_cache"], request_id="s-1")
            assert (slept.status, slept.responses["w1"].boot_id != boot) == ("ok", True)
            assert new.terminate(30) == 0
        shown = [processes.run("control", "show", name, "--json") for name in ("p-1", "s-1")]
    assert [one.returncode for one in shown] == [0, 0]
    traces = [json.loads(one.stdout) for one in shown]
    for trace, steps in zip(traces, (["pause"], ["sleep kv_cache"]), strict=True):
        told = [event for event in trace["events"] if event["what"] not in ("member", "expected")]
        assert [event["what"] for event in told] == ["published", "accepted", *["progress"] * len(steps), "done"]
        assert [event["detail"].partition(" [")[0] for event in told if event["what"] == "progress"] == steps
        assert [event["actor"] for event in told] == ["trainer", *["w1"] * (len(told) - 1)]
        assert all(event["time_ms"] > 0 and event["where"].startswith(topic_prefix) for event in told)
        assert told[-1]["code"] == "ok"
