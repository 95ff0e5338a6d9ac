"""An engine spread over several ranks: every rank's version is compared and told, and one that lags closes all."""

from __future__ import annotations

import pytest

from moebus.broker.memory import MemoryBroker
from moebus.consumers.control import ControlWorkerHost, WorkerSpec
from moebus.engine.port import RankFailed
from moebus.engine.simulated import SimulatedEngine
from moebus.engine.waiting import Never
from moebus.producers.control import ControlClient, FleetError
from moebus.schemas.responses import Code, ControlResponse, Lifecycle
from tests.support.control_lab import Crash, CrashAt, Lab
from tests.support.wait import wait_until

RANKS = 4


@pytest.fixture
def engine(lab: Lab) -> SimulatedEngine:
    return SimulatedEngine(allowed_roots=[str(lab.weights)], ranks=RANKS, clock=lab.clock.monotonic)


def update(lab: Lab, version: str) -> ControlResponse:
    request_id = lab.send("update_weights", {"version": version, "source": lab.file(version)})
    lab.turn()
    lab.decide(request_id)
    return lab.answer(request_id)


def versions(answer: ControlResponse) -> list[object]:
    """What the answer says of each rank."""
    assert answer.result is not None
    ranks = answer.result["ranks"]
    assert isinstance(ranks, dict)
    assert list(ranks) == [str(rank) for rank in range(RANKS)]
    return [entry["version"] for entry in ranks.values() if isinstance(entry, dict)]


def test_every_rank_is_told(lab: Lab, engine: SimulatedEngine) -> None:
    lab.host(engine)
    assert versions(lab.ask("pause")) == ["initial"] * RANKS
    done = update(lab, "v2")
    assert done.code is Code.OK
    assert versions(done) == ["v2"] * RANKS
    assert versions(lab.ask("sleep", {"tags": "weight"})) == [None] * RANKS
    assert versions(lab.ask("wakeup", {"tags": "weight", "resume": True})) == ["v2"] * RANKS


def closed_until_updated(lab: Lab, engine: SimulatedEngine, cut: ControlResponse, version: str) -> None:
    assert (cut.code, cut.error_code) == (Code.RANK_FAILED, 500)
    assert f"the engine says {version!r}, rank 2 holds 'initial'" in cut.message
    assert versions(cut) == [version, version, "initial", version]
    assert cut.state is not None
    assert (cut.state.lifecycle, cut.state.version) == (Lifecycle.TAINTED, None)
    assert lab.ask("resume").code is Code.TAINTED
    assert lab.ask("wakeup", {"resume": True}).code is Code.TAINTED
    assert engine.inspect().paused
    assert "rank 2" in lab.health.ready()["workers"]
    assert update(lab, "v3").code is Code.OK
    assert lab.ask("resume", expect={"version": "v3"}).code is Code.OK


def test_a_rank_that_an_update_did_not_reach(lab: Lab, engine: SimulatedEngine) -> None:
    lab.host(engine)
    lab.ask("pause")
    engine.lag(2)
    closed_until_updated(lab, engine, update(lab, "v2"), "v2")


def test_a_rank_that_a_transfer_did_not_reach(lab: Lab, engine: SimulatedEngine) -> None:
    lab.host(engine)
    lab.ask("pause")
    engine.lag(2)
    steps = [lab.ask("transfer_weights", {"step": step, "version": "v2"}) for step in ("start", "update", "finish")]
    assert [step.code for step in steps[:2]] == [Code.OK, Code.OK]
    closed_until_updated(lab, engine, steps[2], "v2")


@pytest.mark.parametrize("point", ["after_effect", "after_second_state"])
def test_a_successor_looks_at_the_ranks_too(lab: Lab, engine: SimulatedEngine, point: str) -> None:
    """It finds the version that was asked for and a rank that is apart: it loads the weights again."""
    fault = CrashAt(point)
    host = lab.host(engine, fault=fault)
    lab.ask("pause")
    request_id = lab.send("update_weights", {"version": "v2", "source": lab.file("v2")})
    lab.turn()
    fault.armed = True
    lab.send("decide", {"request_id": request_id, "decision": "commit"})
    with pytest.raises(Crash):
        lab.turn()
    lab.crash(host)
    engine.commit(engine.stage("v9", lab.file("v9"), None, Never()), "reset", Never())
    engine.lag(1)
    engine.commit(engine.stage("v2", lab.file("v2"), None, Never()), "reset", Never())
    assert engine.inspect().apart == ("the engine says 'v2', rank 1 holds 'v9'")
    lab.silence()
    lab.host(engine)
    assert [answer.code for answer in lab.answers(request_id)] == [Code.OK]
    assert engine.inspect().apart == ""
    assert lab.ask("resume", expect={"version": "v2"}).code is Code.OK


def test_a_rank_that_fails_by_itself_is_named(lab: Lab, engine: SimulatedEngine) -> None:
    lab.host(engine)
    lab.ask("pause")
    engine.fail_next("commit", RankFailed("rank 3 ended with signal 9"))
    cut = update(lab, "v2")
    assert (cut.code, cut.message) == (Code.RANK_FAILED, "rank 3 ended with signal 9")
    assert lab.ask("resume").code is Code.TAINTED


def test_the_trace_and_the_outcome_name_ranks(lab: Lab, engine: SimulatedEngine) -> None:
    broker: MemoryBroker = lab.broker
    host = ControlWorkerHost(broker, lab.topics, [WorkerSpec("w1", engine)], clock=lab.clock).start()
    try:
        with ControlClient(broker, lab.topics) as client:
            wait_until(lambda: [w.member_id for w in client.workers() if w.state.ready], 30, "ready")
            client.pause()
            good = client.update_weights("v2", source=lab.file("v2")).request_id
            engine.lag(1)
            with pytest.raises(FleetError, match="rank 1 holds 'v2'") as caught:
                client.update_weights("v3", source=lab.file("v3"))
            outcome = caught.value.outcome
            assert (outcome.status, outcome.http_status) == ("failed", 500)
            told = {
                name: next(event.detail for event in client.trace(name).events if event.what == "done")
                for name in (good, outcome.request_id)
            }
    finally:
        host.stop()
    assert "rank 0: v2 rank 1: v2 rank 2: v2 rank 3: v2" in told[good]
    assert "rank 0: v3 rank 1: v2 rank 2: v3 rank 3: v3" in told[outcome.request_id]
