"""With threads: long operations, outages, start without topics. Conditions are waited for, never a fixed time."""

from __future__ import annotations

import pytest

from moebus.consumers.control import ControlWorkerHost, WorkerSpec
from moebus.observability.health import Health
from moebus.schemas.responses import Code, Lifecycle, Phase
from tests.support.control_lab import Lab
from tests.support.gate import Gate
from tests.support.wait import wait_until


def member_state(lab: Lab) -> Lifecycle | None:
    member = lab.member()
    return member.state.lifecycle if member is not None and member.state is not None else None


def test_status_and_heartbeats_during_a_long_operation(lab: Lab) -> None:
    gate = Gate()
    engine = lab.engine(gate=gate)
    host = lab.host(engine, threads=True).start()
    try:
        wait_until(lambda: lab.health.ready() == {}, what="ready")
        gate.close_after("sleep", 0)
        long = lab.send("sleep")
        gate.wait_held()
        status = lab.send("status")
        wait_until(lambda: lab.answers(status), what="status ahead of the sleep")
        assert lab.answer(status).state is not None
        assert lab.answers(long) == []
        before = len(lab.records(lab.topics.members))
        lab.clock.advance(2.0)
        wait_until(lambda: len(lab.records(lab.topics.members)) > before, what="a heartbeat")
        member = lab.member()
        assert member is not None
        assert member.operation is not None
        assert (member.operation.method, member.operation.request_id) == ("sleep", long)
        assert member.busy_until is not None
        assert member.busy_until > lab.clock.now_ms()
        queued = lab.send("resume")
        gate.open()
        wait_until(lambda: lab.answers(queued), what="the command behind it")
        assert lab.answer(long).code is Code.OK
        assert lab.answer(queued).code is Code.ILLEGAL_STATE
    finally:
        gate.open()
        host.stop()
    assert lab.member() is None
    assert host.error is None


def test_an_operation_is_stopped_at_its_deadline(lab: Lab) -> None:
    gate = Gate()
    engine = lab.engine(gate=gate)
    host = lab.host(engine, threads=True).start()
    try:
        wait_until(lambda: lab.health.ready() == {}, what="ready")
        gate.close_after("sleep", 0)
        request_id = lab.send("sleep", {"tags": "kv_cache"}, deadline_s=10)
        gate.wait_held()
        lab.clock.advance(11)
        gate.open()
        wait_until(lambda: lab.answers(request_id), what="an answer")
        assert (lab.answer(request_id).code, lab.answer(request_id).error_code) == (Code.TIMEOUT, 504)
        assert not engine.inspect().paused, "a sleep that did nothing leaves the engine unpaused"
    finally:
        gate.open()
        host.stop()


@pytest.mark.parametrize("held", ["commit", "discard"])
def test_a_begun_decision_is_never_stopped(lab: Lab, held: str) -> None:
    """`decide` has no deadline, and that of the update does not cut a commit that has begun."""
    gate = Gate()
    engine = lab.engine(gate=gate)
    host = lab.host(engine, threads=True).start()
    try:
        wait_until(lambda: lab.health.ready() == {}, what="ready")
        paused = lab.send("pause")
        update = lab.send("update_weights", {"version": "v2", "source": lab.file("v2")}, deadline_s=10)
        wait_until(lambda: lab.answers(paused) and lab.answers(update, phase=Phase.STAGED), what="staged")
        gate.close_after(held, 0)
        lab.send("decide", {"request_id": update, "decision": "commit" if held == "commit" else "void"})
        gate.wait_held()
        lab.clock.advance(3600)
        gate.open()
        wait_until(lambda: lab.answers(update), what="the end")
        assert lab.answer(update).code is (Code.OK if held == "commit" else Code.FAILED)
        assert engine.inspect().version == ("v2" if held == "commit" else "initial")
        assert not engine.inspect().tainted
    finally:
        gate.open()
        host.stop()


def test_draining_is_shown(lab: Lab) -> None:
    gate = Gate()
    host = lab.host(lab.engine(gate=gate), threads=True).start()
    try:
        wait_until(lambda: lab.health.ready() == {}, what="ready")
        gate.close_after("pause", 0)
        lab.send("pause")
        gate.wait_held()
        lab.clock.advance(2.0)
        wait_until(lambda: member_state(lab) is Lifecycle.DRAINING, what="DRAINING")
        gate.open()
        wait_until(lambda: member_state(lab) is Lifecycle.PAUSED, what="PAUSED")
    finally:
        gate.open()
        host.stop()


def test_an_outage_delays_and_loses_nothing(lab: Lab) -> None:
    gate = Gate()
    engine = lab.engine(gate=gate)
    host = lab.host(engine, threads=True).start()
    try:
        wait_until(lambda: lab.health.ready() == {}, what="ready")
        gate.close_after("pause", 0)
        request_id = lab.send("pause")
        gate.wait_held()
        with lab.broker.outage():
            gate.open()
            wait_until(lambda: engine.inspect().paused, what="the effect")
        wait_until(lambda: lab.answers(request_id), what="an answer")
        assert [answer.code for answer in lab.answers(request_id)] == [Code.OK]
    finally:
        gate.open()
        host.stop()


def test_a_worker_that_kafka_does_not_hear_is_not_ready(lab: Lab) -> None:
    host = lab.host(lab.engine())
    assert lab.health.ready() == {}
    with lab.broker.outage():
        lab.clock.advance(10.5)
        host.step()
        assert "acknowledged nothing for 10 s" in lab.health.ready()["workers"]
    lab.clock.advance(2.0)

    def ready_again() -> bool:
        host.step()
        return lab.health.ready() == {}

    wait_until(ready_again, what="ready again")


def test_a_worker_waits_for_its_topics_and_says_so() -> None:
    from moebus.broker.memory import MemoryBroker
    from moebus.broker.topics import Topics, ensure
    from moebus.engine.simulated import SimulatedEngine

    broker, topics, health = MemoryBroker(), Topics("late"), Health()
    host = ControlWorkerHost(broker, topics, [WorkerSpec("w1", SimulatedEngine())], health=health).start()
    try:
        wait_until(lambda: "topics ensure" in health.ready().get("workers", ""), what="the reason")
        ensure(broker.admin(), topics)
        wait_until(lambda: health.ready() == {}, what="ready")
    finally:
        host.stop()
        broker.close()
    assert not host.alive


def test_a_stop_without_a_broker_ends(lab: Lab) -> None:
    host = lab.host(lab.engine(), threads=True).start()
    wait_until(lambda: lab.health.ready() == {}, what="ready")
    with lab.broker.outage():
        host.stop()
    assert not host.alive


def test_many_workers_in_one_process(lab: Lab) -> None:
    engines = [lab.engine() for _ in range(20)]
    ids = tuple(f"w{n}" for n in range(20))
    host = lab.host(*engines, ids=ids, threads=True).start()
    try:
        wait_until(lambda: lab.health.ready() == {}, what="ready")
        request_id = lab.send("pause")
        wait_until(lambda: len(lab.answers(request_id)) == 20, what="20 answers")
        assert {answer.worker_id for answer in lab.answers(request_id)} == set(ids)
        assert {answer.phase for answer in lab.answers(request_id)} == {Phase.DONE}
    finally:
        host.stop()


@pytest.mark.parametrize("bad", ["", "all", "a b", "x" * 65, "ä"])
def test_worker_ids(lab: Lab, bad: str) -> None:
    with pytest.raises(ValueError, match="worker_id: 1 to 64"):
        ControlWorkerHost(lab.broker, lab.topics, [WorkerSpec(bad, lab.engine())])
