"""`moebus worker` as a process of its own beside SGLang's and FastDeploy's stand-ins, over a real Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.topics import Topics, ensure
from moebus.producers import ControlClient, FleetError
from moebus.schemas.responses import Code, Lifecycle
from moebus.schemas.tags import Tag
from tests.support.processes import Launcher, Service, launcher
from tests.support.stand_ins import fastdeploy, sglang
from tests.support.stand_ins.running import Running
from tests.support.stand_ins.shared import shared
from tests.support.wait import wait_until

pytestmark = pytest.mark.kafka


@dataclass
class Fleet:
    """One worker and a controller."""

    control: ControlClient
    processes: Launcher

    def worker(self, kind: str, url: str) -> Service:
        arguments = ("--worker-id", "w1", "--weight-root", str(self.processes.directory))
        started = self.processes.start("w1", "worker", "--engine", kind, "--engine-url", url, *arguments)
        self.wait_ready()
        return started

    def wait_ready(self) -> None:
        wait_until(lambda: any(view.live and view.state.ready for view in self.control.workers()), 60, "a ready worker")

    def state(self) -> tuple[Lifecycle | None, str | None]:
        (view,) = self.control.workers()
        state = view.state.state
        return (None, None) if state is None else (state.lifecycle, state.version)

    def refused(self, method: str, **args: object) -> Code:
        with pytest.raises(FleetError) as caught:
            getattr(self.control, method)(**args)
        return caught.value.outcome.responses["w1"].code


@pytest.fixture
def fleet(
    kafka_broker: LocalCluster, topic_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Fleet]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    broker, topics = open_broker(kafka_broker.bootstrap), Topics(topic_prefix)
    ensure(broker.admin(), topics)
    with (
        launcher(tmp_path, kafka_broker.bootstrap, topic_prefix) as processes,
        ControlClient(broker, topics) as control,
    ):
        yield Fleet(control, processes)
    broker.close()


def test_sglang(fleet: Fleet, tmp_path: Path) -> None:
    at = sglang.StandIn()
    step = tmp_path / "step-1"
    step.mkdir()
    with shared(sglang.application(at)) as running:
        worker = fleet.worker("sglang", running.url)
        at.running = ["a"]
        assert fleet.refused("pause", mode="wait") is Code.UNSUPPORTED
        fleet.control.pause()
        assert at.ended == {"a": "abort"}
        fleet.control.update_weights("step-1", source=str(step))
        assert (at.weights, at.weight_version) == (str(step), "step-1")
        assert fleet.refused("sleep", tags=["weight"]) is Code.UNSUPPORTED  # offload, without a host copy
        fleet.control.sleep(level="discard")
        assert at.asleep == {"weights", "kv_cache"}
        worker.terminate()
        fleet.worker("sglang", running.url)  # a process that has seen none of it
        assert not at.dead
        assert fleet.refused("resume") is Code.ILLEGAL_STATE
        fleet.control.wakeup()
        assert (at.asleep, at.weights) == (set(), str(step))
        fleet.control.resume()
        wait_until(lambda: fleet.state() == (Lifecycle.RUNNING, "step-1"), 30, "the state behind the answer")
        assert at.serves()
        assert not at.dead
        at.calls.clear()
        at.restart()  # with its first weights, open
        wait_until(lambda: at.weights == str(step) and at.serves(), 60, "the fleet's weights on the new server")
        assert [path for path, _ in at.calls] == [
            "/pause_generation",
            "/flush_cache",
            "/update_weights_from_disk",
            "/continue_generation",
        ]


def test_fastdeploy(fleet: Fleet) -> None:
    at = fastdeploy.StandIn(strategy="ipc_snapshot")
    running = Running(fastdeploy.application(at))
    fleet.worker("fastdeploy", running.url)
    at.running = ["a"]
    assert fleet.refused("pause", mode="keep") is Code.UNSUPPORTED
    fleet.control.pause()
    assert at.ended == {"a": "abort"}
    assert fleet.refused("transfer_weights", step="init") is Code.UNSUPPORTED
    fleet.control.sleep(level="discard")
    assert at.asleep == {"weight", "kv_cache"}
    assert fleet.refused("resume") is Code.ILLEGAL_STATE
    assert fleet.refused("wakeup", tags=["kv_cache"]) is Code.UNSUPPORTED
    woken = fleet.control.wakeup().responses["w1"].state
    assert woken is not None
    assert {str(tag): str(held) for tag, held in woken.tags.items()} == dict.fromkeys(map(str, Tag), "resident")
    assert (at.asleep, at.paused, at.admitted) == (set(), True, [])

    at.strategy = "rsync"
    fleet.control.call("update_weights", {"version": "step-1", "options": {"verify_checksum": True}})
    assert at.weights == "step-1"
    assert fleet.refused("update_weights", version="step-2", source="/ckpt/2") is Code.UNSUPPORTED
    at.faults.lagging_rank = True
    assert fleet.refused("update_weights", version="step-2") is Code.RANK_FAILED
    assert fleet.refused("resume") is Code.TAINTED
    at.faults.lagging_rank = False
    fleet.control.update_weights("step-3")
    fleet.control.resume()
    assert not at.paused

    running.kill()
    at.restart()
    running.boot(fastdeploy.application(at))  # before anybody has asked in vain
    wait_until(lambda: at.weights == "step-3" and not at.paused, 60, "the fleet's version on the new server")
    running.kill()
