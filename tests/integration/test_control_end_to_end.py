"""ControlClient with the real control worker beside simulated engines, on the in-memory log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from moebus.broker.memory import MemoryBroker
from moebus.broker.topics import Topics, ensure
from moebus.consumers.control import ControlWorkerHost, WorkerSpec
from moebus.engine.port import EngineRefused
from moebus.engine.simulated import SimulatedEngine
from moebus.producers.control import ControlClient, FleetError, FleetPartial
from moebus.schemas.control import Expect
from moebus.schemas.responses import Code, Lifecycle
from tests.support.wait import wait_until

TOPICS = Topics("t")
NAMES = ("worker-1", "worker-2")


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    broker = MemoryBroker()
    ensure(broker.admin(), TOPICS)
    yield broker
    broker.close()


@pytest.fixture
def engines(tmp_path: Path) -> list[SimulatedEngine]:
    return [SimulatedEngine(allowed_roots=[str(tmp_path)]) for _ in NAMES]


@pytest.fixture
def host(broker: MemoryBroker, engines: list[SimulatedEngine]) -> Iterator[ControlWorkerHost]:
    specs = [WorkerSpec(name, engine, {"role": "rollout"}) for name, engine in zip(NAMES, engines, strict=True)]
    host = ControlWorkerHost(broker, TOPICS, specs)
    host.start()
    yield host
    host.stop()


@pytest.fixture
def client(broker: MemoryBroker, host: ControlWorkerHost) -> Iterator[ControlClient]:
    with ControlClient(broker, TOPICS, issuer="first") as client:
        wait_until(
            lambda: [w.member_id for w in client.workers() if w.live and w.state.ready] == list(NAMES), 20, "ready"
        )
        yield client


def test_the_colocated_loop_of_one_training_step(client: ControlClient, engines: list[SimulatedEngine]) -> None:
    outcomes = [
        client.begin_run("exp"),
        client.resume(run="exp"),
        client.pause("wait"),
        client.sleep(["kv_cache"]),
        client.sleep(["weight"]),
        client.wakeup(["weight"]),
        client.wakeup(["kv_cache"]),
        client.update_weights("v2"),
        client.resume(expect=Expect(version="v2")),
        client.status(target="role=rollout"),
    ]
    assert [outcome.status for outcome in outcomes] == ["ok"] * len(outcomes)
    assert all(tuple(outcome.responses) == NAMES for outcome in outcomes)
    assert outcomes[7].decision == "commit"
    assert [engine.inspect().version for engine in engines] == ["v2", "v2"]
    assert not any(engine.inspect().paused for engine in engines)
    state = outcomes[-1].responses["worker-1"].state
    assert state is not None
    assert (state.lifecycle, state.version, state.run) == (Lifecycle.RUNNING, "v2", "exp")
    assert [w.state.state.version for w in client.workers() if w.state.state is not None] == ["v2", "v2"]


def test_an_update_that_one_engine_refuses_changes_none(client: ControlClient, engines: list[SimulatedEngine]) -> None:
    client.pause()
    engines[1].fail_next("stage", EngineRefused("layer 3 has the wrong shape"))
    with pytest.raises(
        FleetError, match=r"worker-2 answered failed \(and 1 more\): .*layer 3 has the wrong shape"
    ) as caught:
        client.update_weights("v2")
    outcome = caught.value.outcome
    assert (outcome.status, outcome.decision) == ("failed", "void")
    assert outcome.responses["worker-1"].message == "voided"
    assert [engine.inspect().version for engine in engines] == ["initial", "initial"]
    assert client.update_weights("v3").ok
    assert [engine.inspect().version for engine in engines] == ["v3", "v3"]


def test_illegal_and_repeated_commands(client: ControlClient) -> None:
    assert {r.code for r in client.resume().responses.values()} == {Code.ALREADY}
    client.sleep(["weight"])
    with pytest.raises(FleetError, match="illegal_state") as caught:
        client.resume()
    assert caught.value.http_status == 409
    first = client.pause(request_id="p-1")
    assert client.pause(request_id="p-1") == first
    with pytest.raises(FleetError, match="conflict"):
        client.resume(request_id="p-1")
    assert client.operation("p-1") == first


def test_two_controllers_that_both_build_on_the_same_command(broker: MemoryBroker, client: ControlClient) -> None:
    base = client.pause().position
    assert base is not None
    with ControlClient(broker, TOPICS, issuer="second") as second:
        won = client.sleep(["kv_cache"], expect=Expect(after=base.offset), request_id="won")
        with pytest.raises(FleetError, match="conflict") as caught:
            second.wakeup(expect=Expect(after=base.offset))
        assert won.ok
        assert won.position is not None
        named = f"request 'won' at offset {won.position.offset} came first"
        assert {r.message for r in caught.value.outcome.responses.values()} == {f"expect.after={base.offset}: {named}"}
        assert caught.value.outcome.http_status == 409
        assert second.operation("won") == won
        assert second.history(2)[0].request.request_id == "won"


def test_two_controllers_that_both_update_from_the_same_version(broker: MemoryBroker, client: ControlClient) -> None:
    client.pause()
    with ControlClient(broker, TOPICS, issuer="second") as second:
        won = client.update_weights("v2", expect=Expect(version="initial"), request_id="won")
        with pytest.raises(FleetError, match="conflict") as caught:
            second.update_weights("v3", expect=Expect(version="initial"))
        assert won.position is not None
        text = f"expect.version='initial': the weights are 'v2' by request 'won' at offset {won.position.offset}"
        assert {r.message for r in caught.value.outcome.responses.values()} == {text}
        assert caught.value.outcome.decision == "void"
        assert second.resume(expect=Expect(version="v2")).ok


def test_partial_and_min_ok(client: ControlClient, engines: list[SimulatedEngine]) -> None:
    client.sleep(["kv_cache"], target="worker-1")
    with pytest.raises(FleetPartial, match="worker-1 answered illegal_state"):
        client.resume()
    assert client.resume(min_ok=1).ok


def test_the_trace_spans_client_and_workers(client: ControlClient) -> None:
    request_id = client.sleep().request_id
    trace = client.trace(request_id)
    whats = [(event.actor, event.what) for event in trace.events]
    assert whats[0] == ("first", "published")
    for name in NAMES:
        assert (name, "accepted") in whats
        assert (name, "done") in whats
    assert ("first", "expected") in whats
    details = {event.detail for event in trace.events if event.what == "done"}
    assert len(details) == 1
    assert "weight: done freed_bytes=" in details.pop(), "what became of each tag"
    steps = [
        event.detail.partition(" [")[0] for event in trace.events if (event.actor, event.what) == (NAMES[0], "progress")
    ]
    assert steps == ["pause", "sleep weight", "sleep kv_cache"]
    times = [event.time_ms for event in trace.events]
    assert times == sorted(times)
    assert json.loads(json.dumps(trace.as_dict()))["outcome"]["status"] == "ok"
