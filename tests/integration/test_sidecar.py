"""`moebus worker --engine vllm` beside a server, as processes on a real Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.topics import Topics, ensure
from moebus.observability.settings import KafkaSettings
from moebus.producers import ControlClient, FleetError
from moebus.schemas.responses import Code, Lifecycle
from tests.support.processes import Launcher, Service, launcher
from tests.support.stand_ins.vllm import VllmStandIn
from tests.support.stand_ins.vllm_core import Bugs
from tests.support.wait import wait_until

pytestmark = pytest.mark.kafka


@dataclass
class Fleet:
    server: VllmStandIn
    run: Launcher
    control: ControlClient
    root: Path

    def worker(self) -> Service:
        config = self.root / "moebus.toml"
        config.write_text("[worker]\nheartbeat = 0.3\n")
        return self.run.start(
            "v1", "--config", str(config), "worker", "--engine", "vllm", "--engine-url", self.server.url,
            "--worker-id", "v1", "--http-port", "0", "--weight-root", str(self.root),
        )  # fmt: skip

    def page(self) -> str:
        found = self.member()
        assert found.http is not None
        return str(found.http)

    def member(self) -> Any:
        views = [view for view in self.control.workers() if view.state.member_id == "v1"]
        return wait_until(lambda: views, 30.0, "the member")[0].state

    def ready(self) -> bool:
        views = [view.state for view in self.control.workers() if view.live]
        return bool(views) and bool(views[0].ready)


@pytest.fixture
def fleet(
    kafka_broker: LocalCluster, topic_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fleet]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    topics = Topics(topic_prefix)
    broker = open_broker(KafkaSettings(bootstrap_servers=kafka_broker.bootstrap))
    ensure(broker.admin(), topics)
    server = VllmStandIn(Bugs())
    with launcher(tmp_path, kafka_broker.bootstrap, topic_prefix) as run, ControlClient(broker, topics) as control:
        yield Fleet(server, run, control, tmp_path)
    server.leave()
    broker.close()


def ask(server: VllmStandIn) -> Any:
    answer = httpx.post(f"{server.url}/v1/completions", json={"max_tokens": 2}, timeout=30.0)
    return answer.json()["choices"][0]["weights"]


def test_the_colocated_loop_of_a_sidecar(fleet: Fleet) -> None:
    """The server comes later than its worker, is slept, woken, updated and resumed over the bus, and dies."""
    server, control = fleet.server, fleet.control
    server.kill()
    worker = fleet.worker()
    worker.wait_log("takes no connection")
    worker.wait_log("the worker waits and goes on by itself")
    assert worker.alive()
    assert control.workers() == [], "not a member before its engine can be driven"
    server.boot()
    wait_until(fleet.ready, 30.0, "the worker is ready")
    page = fleet.page()
    refused = httpx.post(f"{page}/v1/generate", json={})
    assert (refused.status_code, server.url in refused.json()["detail"]) == (501, True)

    with pytest.raises(FleetError, match="name kv_cache too"):
        control.sleep("weight")
    slept = control.sleep(level="discard")
    assert slept.result["v1"]["tags"] == {"weight": {"outcome": "done"}, "kv_cache": {"outcome": "done"}}
    assert server.core.asleep == {"weights", "kv_cache"}
    control.wakeup("weight", weights="empty")
    folder = fleet.root / "w5"
    folder.mkdir()
    (folder / "model.safetensors").write_text("w5")
    control.update_weights("step-5", str(folder))
    woken = control.wakeup("kv_cache", resume=True).responses["v1"]
    assert woken.state is not None
    assert (woken.state.lifecycle, woken.state.version) == (Lifecycle.RUNNING, "step-5")
    assert ask(server) == "w5"
    assert server.core.accidents == []

    server.kill()
    wait_until(lambda: httpx.get(f"{page}/readyz").status_code == 503, 30.0, "/readyz is red")
    assert "takes no connection" in httpx.get(f"{page}/readyz").text
    dead = control.call("reset_cache", check=False)
    assert dead.responses["v1"].code is Code.FAILED
    server.boot()
    wait_until(lambda: server.core.weights == "w5", 30.0, "the committed weights are loaded again")
    wait_until(lambda: httpx.get(f"{page}/readyz").status_code == 200, 30.0, "/readyz is green")
    assert ask(server) == "w5"
    assert server.faults.count("/pause") >= 3, "closed before it was restored"
    assert worker.terminate() == 0
    assert server.core.pause_state == "open", "the server goes on without its worker"
