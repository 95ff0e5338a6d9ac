"""Fleets: who is meant, how many answers are enough, late answers, long operations, large commands, many workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping

import pytest

from moebus.broker import open_broker
from moebus.broker.local import LocalCluster
from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import Broker, OutRecord
from moebus.broker.topics import Topics, ensure
from moebus.consumers.control import ControlWorkerHost, WorkerSpec
from moebus.engine.simulated import SimulatedEngine
from moebus.observability.clock import ManualClock
from moebus.producers.control import ControlClient, FleetTimeout
from moebus.schemas.control_args import Method
from moebus.schemas.errors import InvalidInput
from moebus.schemas.members import MemberState, encode_member
from moebus.schemas.responses import Code, ControlResponse, Phase
from tests.support.background import Background
from tests.support.fake_worker import SILENT, FakeWorker, Reply
from tests.support.wait import wait_until

TOPICS = Topics("t")
NAMES = [f"model.layers.{n // 600}.mlp.experts.{n % 600}.down_proj.weight_scale_inv" for n in range(36_000)]


@pytest.fixture
def broker() -> Iterator[MemoryBroker]:
    broker = MemoryBroker()
    ensure(broker.admin(), TOPICS)
    yield broker
    broker.close()


@pytest.fixture
def client(broker: MemoryBroker) -> Iterator[ControlClient]:
    with ControlClient(broker, TOPICS, issuer="test") as client:
        yield client


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (None, "abc"),
        ("all", "abc"),
        ("b", "b"),
        (["a", "c"], "ac"),
        ("role=rollout", "ab"),
        ("role=rollout,zone in (x,z)", "a"),
        ("zone in (x,y)", "ab"),
    ],
)
def test_who_is_meant(
    broker: MemoryBroker, client: ControlClient, target: str | list[str] | None, expected: str
) -> None:
    labels: Mapping[str, dict[str, str]] = {
        "a": {"role": "rollout", "zone": "x"}, "b": {"role": "rollout", "zone": "y"}, "c": {"role": "eval"},
    }  # fmt: skip
    with (
        FakeWorker(broker, TOPICS, "a", labels["a"]),
        FakeWorker(broker, TOPICS, "b", labels["b"]),
        FakeWorker(broker, TOPICS, "c", labels["c"]),
    ):
        outcome = client.pause(target=target)
        assert "".join(outcome.responses) == "".join(outcome.expected or ()) == expected


def test_a_worker_that_came_after_the_command_is_not_waited_for(broker: MemoryBroker, client: ControlClient) -> None:
    silent = {Method.PAUSE: SILENT}
    with FakeWorker(broker, TOPICS, "a", script=silent) as a:
        operation = client.submit("pause", deadline_s=60)
        with FakeWorker(broker, TOPICS, "b") as b:
            request = wait_until(lambda: [r for r in a.seen if r.method is Method.PAUSE], what="the command")[0]
            b.answer(request, operation.position.offset, Reply())
            wait_until(lambda: "b" in operation.outcome().others, what="its answer")
            assert operation.outcome().status == "timeout", "b counts for nothing"
            a.answer(request, operation.position.offset, Reply())
            outcome = operation.wait(30)
    assert (outcome.status, tuple(outcome.responses), tuple(outcome.others)) == ("ok", ("a",), ("b",))


def test_a_quorum_does_not_wait_and_what_comes_late_is_recorded(broker: MemoryBroker, client: ControlClient) -> None:
    script = {Method.PAUSE: SILENT}
    with (
        FakeWorker(broker, TOPICS, "a"),
        FakeWorker(broker, TOPICS, "b"),
        FakeWorker(broker, TOPICS, "c", script=script) as c,
    ):
        outcome = client.pause(min_ok=2, timeout=600)
        assert (outcome.status, outcome.missing, outcome.decision) == ("ok", ("c",), None), "nothing is voided"
        assert client.operation(outcome.request_id).status == "timeout", "for who asks for all of them"
        assert outcome.position is not None
        c.answer(c.seen[-1], outcome.position.offset, Reply(code=Code.FAILED, message="too late"))
        wait_until(lambda: client.operation(outcome.request_id).status == "partial", 30, "the late answer")
        assert client.operation(outcome.request_id, min_ok=2).status == "ok"
        assert client.operation(outcome.request_id).responses["c"].message == "too late"
    with pytest.raises(InvalidInput, match="min_ok"):
        client.pause(min_ok=0)


def test_answers_are_shown_as_they_arrive(broker: MemoryBroker, client: ControlClient) -> None:
    shown: list[str] = []

    def progress(response: ControlResponse) -> None:
        if response.phase is Phase.DONE:
            shown.append(response.worker_id or "")

    with FakeWorker(broker, TOPICS, "a"), FakeWorker(broker, TOPICS, "b", script={Method.PAUSE: SILENT}) as b:
        call = Background(lambda: client.pause(timeout=600, progress=progress))
        wait_until(lambda: shown == ["a"], 30, "the first answer, while b has said nothing")
        assert not call.done
        request = wait_until(lambda: [r for r in b.seen if r.method is Method.PAUSE], 30, "the command at b")[0]
        b.answer(request, 0, Reply())
        assert call.result().ok
    assert shown == ["a", "b"]


def test_a_worker_that_never_answers_is_named_in_bounded_time(broker: MemoryBroker, client: ControlClient) -> None:
    with FakeWorker(broker, TOPICS, "a"), FakeWorker(broker, TOPICS, "b", script={Method.PAUSE: SILENT}):
        started = time.monotonic()
        with pytest.raises(FleetTimeout, match="no answer in time from b; what they did is unknown"):
            client.pause(timeout=0.2)
        assert time.monotonic() - started < 20


def test_a_long_operation_is_not_a_death(broker_clock: ManualClock, timed: MemoryBroker) -> None:
    """A worker that is too busy for heartbeats says until when; it is waited for, and dead only after that."""
    now = broker_clock.now_ms()
    writer = timed.writer("w")
    for worker, busy_until in (("busy", now + 60_000), ("dead", None)):
        state = MemberState(kind="worker", member_id=worker, boot_id="b1", since=0, ready=True, busy_until=busy_until)
        value, headers = encode_member(state)
        writer.append(OutRecord(TOPICS.members, value, worker.encode(), headers)).result(10)
    with ControlClient(timed, TOPICS) as client:
        assert client.submit("pause").outcome().expected == ("busy", "dead")
        broker_clock.advance(30)
        operation = client.submit("pause")
        assert operation.outcome().expected == ("busy",)
        assert [(view.member_id, view.live) for view in client.workers()] == [("busy", True), ("dead", False)]
        broker_clock.advance(31)
        assert client.submit("pause").outcome().status == "no_targets"


@pytest.fixture
def broker_clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def timed(broker_clock: ManualClock) -> Iterator[MemoryBroker]:
    broker = MemoryBroker(broker_clock)
    ensure(broker.admin(), TOPICS)
    yield broker
    broker.close()


def test_answers_that_nobody_waits_for_are_not_kept(broker: MemoryBroker, client: ControlClient) -> None:
    """R24: late and foreign answers stay in the log and nowhere else."""
    with FakeWorker(broker, TOPICS, "a") as a:
        outcome = client.pause()
        for _ in range(2_000):
            a.answer(a.seen[-1], 1, Reply(code=Code.FAILED))
        assert client.status().ok
        follower = client._follower
        wait_until(lambda: not follower._watched and not follower._listeners, 30, "nothing watched")
        assert client.operation(outcome.request_id) == outcome, "the first answer counts"


def test_a_fleet_of_sixty_at_two_hosts(broker: MemoryBroker, client: ControlClient) -> None:
    """The small brother of bench/bench_control_fleet.py."""
    hosts = [
        ControlWorkerHost(
            broker,
            TOPICS,
            [WorkerSpec(f"w{n:02}", SimulatedEngine(), {"half": str(half)}) for n in range(half * 30, half * 30 + 30)],
        ).start()
        for half in range(2)
    ]
    try:
        wait_until(lambda: sum(w.live and w.state.ready for w in client.workers()) == 60, 60, "60 workers")
        threads = threading.active_count()
        for _ in range(3):
            for method in ("pause", "resume"):
                outcome = client.call(method, timeout=60)
                assert (outcome.status, len(outcome.responses)) == ("ok", 60)
        assert len(client.sleep(target="half=1").responses) == 30
        assert threading.active_count() <= threads, "commands leave no threads behind"
    finally:
        for host in hosts:
            host.stop()


@pytest.mark.kafka
def test_a_command_that_names_36000_tensors(kafka_broker: LocalCluster, topic_prefix: str) -> None:
    """2.6 MB of JSON from the client over Kafka to the engine; more than 16 MiB is refused before it is sent."""
    topics, seen = Topics(topic_prefix), []
    broker: Broker = open_broker(kafka_broker.bootstrap)
    ensure(broker.admin(), topics)
    engine = SimulatedEngine()
    plain = engine.transfer

    def transfer(step: str, version: str | None, info: Mapping[str, object], deadline: object) -> None:
        seen.append(info)
        plain(step, version, info, deadline)  # type: ignore[arg-type]

    engine.transfer = transfer  # type: ignore[method-assign]
    host = ControlWorkerHost(broker, topics, [WorkerSpec("w1", engine)]).start()
    try:
        with ControlClient(broker, topics) as client:
            wait_until(lambda: [w.member_id for w in client.workers() if w.state.ready], 30, "ready")
            client.pause()
            outcome = client.transfer_weights("init", info={"names": NAMES})
            assert outcome.ok
            assert seen == [{"names": NAMES}]
            assert client.operation(outcome.request_id).ok
            before = client.history(1)
            with pytest.raises(InvalidInput, match="at most 16777216 are allowed"):
                client.transfer_weights("init", info={"names": [" " * 1024] * 17_000})
            assert client.history(1) == before, "nothing was sent"
    finally:
        host.stop()
        broker.close()
