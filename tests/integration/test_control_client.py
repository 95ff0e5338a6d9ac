"""ControlClient against scripted workers on the in-memory log."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator

import pytest

from moebus.broker.errors import BrokerUnavailable, RecordTooLarge, TopicMissing
from moebus.broker.memory import MemoryBroker
from moebus.broker.ports import OutRecord
from moebus.broker.topics import Topics, ensure
from moebus.observability.metrics import Metrics
from moebus.observability.settings import load_settings
from moebus.producers.control import ControlClient, FleetError, FleetPartial, FleetTimeout, Outcome, UnknownOperation
from moebus.schemas.control import encode_request, make_request
from moebus.schemas.control_args import DecideArgs, Method
from moebus.schemas.errors import InvalidInput
from moebus.schemas.responses import Code, ControlResponse, Phase, encode_response
from tests.support.background import Background
from tests.support.fake_worker import OK, SILENT, FakeWorker, Reply, staged
from tests.support.wait import wait_until

TOPICS = Topics("t")
ROLLOUT = {"role": "rollout"}


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


def refusing(method: Method, code: Code, message: str = "no") -> dict[Method, tuple[Reply, ...]]:
    return {method: (Reply(Phase.ACCEPTED), Reply(code=code, message=message))}


def decisions(worker: FakeWorker) -> list[str]:
    return [r.command.decision for r in worker.seen if isinstance(r.command, DecideArgs)]


def test_every_method_reaches_the_workers_that_match(broker: MemoryBroker, client: ControlClient) -> None:
    with FakeWorker(broker, TOPICS, "a", ROLLOUT) as a, FakeWorker(broker, TOPICS, "b", {"role": "eval"}) as b:
        outcomes = [
            client.begin_run("exp"),
            client.pause("wait"),
            client.sleep(["kv_cache"], level="discard"),
            client.wakeup("weight,kv_cache", resume=True),
            client.update_weights("v2", source="file:///x"),
            client.transfer_weights("finish", "v3", {"names": ["w"]}),
            client.reset_cache(target="role=rollout"),
            client.abort_requests(all=True, target=["a"]),
            client.abort_requests(["r"], target="a"),
            client.status(run="exp", target="role in (rollout,eval)"),
            client.resume(),
        ]
        assert [outcome.status for outcome in outcomes] == ["ok"] * 11
        asked = [str(r.method) for r in a.seen if r.method not in (Method.HELLO, Method.DECIDE)]
        assert asked == [outcome.method for outcome in outcomes]
        assert [list(o.responses) for o in outcomes[6:9]] == [["a"], ["a"], ["a"]]
        assert Method.RESET_CACHE not in [r.method for r in b.seen]
        assert a.seen[-2].run == "exp"
        assert a.seen[-1].issuer == "test"


def test_a_worker_that_fails_makes_it_partial(broker: MemoryBroker, client: ControlClient) -> None:
    with FakeWorker(broker, TOPICS, "a"), FakeWorker(broker, TOPICS, "b", script=refusing(Method.SLEEP, Code.FAILED)):
        with pytest.raises(FleetPartial, match="b answered failed: no") as caught:
            client.sleep()
        assert caught.value.outcome.responses["a"].code is Code.OK
        assert client.sleep(check=False).status == "partial"
        assert client.sleep(min_ok=1).status == "ok"


def test_nobody_matches(broker: MemoryBroker, client: ControlClient) -> None:
    with FakeWorker(broker, TOPICS, "a", ROLLOUT), pytest.raises(FleetError, match="no live worker") as caught:
        client.pause(target="role=trainer")
    assert caught.value.http_status == 404


def test_a_timeout_names_the_missing_worker_and_voids_the_command(broker: MemoryBroker, client: ControlClient) -> None:
    silent = {Method.PAUSE: (Reply(Phase.ACCEPTED),)}
    with FakeWorker(broker, TOPICS, "a"), FakeWorker(broker, TOPICS, "b", script=silent) as b:
        with pytest.raises(FleetTimeout, match="no answer in time from b") as caught:
            client.pause(timeout=0.05)
        outcome = caught.value.outcome
        assert outcome.missing == ("b",)
        assert wait_until(lambda: decisions(b), what="the void") == ["void"]
        seen = client.operation(outcome.request_id)
        assert (seen.status, seen.missing, seen.decision) == ("timeout", ("b",), "void")
        b.answer(b.seen[-2], seen.position.offset if seen.position else -1, Reply())  # late, and in the log for ever
        wait_until(lambda: client.operation(outcome.request_id).status == "ok", what="the late answer")


def test_progress_has_seen_every_answer_that_the_outcome_counts(
    broker: MemoryBroker, client: ControlClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that comes at the very moment at which the outcome is made."""
    with FakeWorker(broker, TOPICS, "a", script={Method.PAUSE: SILENT}) as a:
        operation = client.submit(Method.PAUSE)
        pause = wait_until(lambda: [r for r in a.seen if r.method is Method.PAUSE], what="the command")[0]
        counted, answered = operation.outcome, threading.Event()

        def meanwhile() -> Outcome:
            if not answered.is_set():
                answered.set()
                a.answer(pause, operation.position.offset, Reply())
                wait_until(lambda: counted().complete, what="the answer")
            return counted()

        monkeypatch.setattr(operation, "outcome", meanwhile)
        seen: list[Phase] = []
        assert operation.wait(30, lambda response: seen.append(response.phase)).status == "ok"
        assert Phase.DONE in seen


def test_an_update_is_committed_once_everybody_has_staged(broker: MemoryBroker, client: ControlClient) -> None:
    phases: list[tuple[str | None, Phase]] = []
    threads: set[int] = set()

    def progress(response: ControlResponse) -> None:
        phases.append((response.worker_id, response.phase))
        threads.add(threading.get_ident())

    with FakeWorker(broker, TOPICS, "a") as a, FakeWorker(broker, TOPICS, "b") as b:
        outcome = client.update_weights("v2", progress=progress)
        assert (outcome.status, outcome.decision) == ("ok", "commit")
        assert decisions(a) == decisions(b) == ["commit"]
        assert set(outcome.staged) == {"a", "b"}
        assert phases.count((None, Phase.EXPECTED)) == 1
        assert phases.count(("a", Phase.STAGED)) == phases.count(("a", Phase.DONE)) == 1
        assert threads == {threading.get_ident()}


@pytest.mark.parametrize(
    ("script", "status"),
    [
        (refusing(Method.UPDATE_WEIGHTS, Code.ILLEGAL_STATE, "not paused"), "failed"),
        ({Method.UPDATE_WEIGHTS: staged("another digest")}, "failed"),
        ({Method.UPDATE_WEIGHTS: SILENT}, "timeout"),
    ],
    ids=["refused", "other digest", "silent"],
)
def test_an_update_that_one_worker_cannot_follow_is_voided_everywhere(
    broker: MemoryBroker, client: ControlClient, script: dict[Method, tuple[Reply, ...]], status: str
) -> None:
    with FakeWorker(broker, TOPICS, "a") as a, FakeWorker(broker, TOPICS, "b", script=script):
        outcome = client.update_weights("v2", check=False, timeout=0.3 if status == "timeout" else 30)
        assert (outcome.status, outcome.decision) == (status, "void")
        assert outcome.responses["a"].message == "voided"
        assert decisions(a) == ["void"]


def test_a_void_that_came_first_beats_the_commit(broker: MemoryBroker, client: ControlClient) -> None:
    with FakeWorker(broker, TOPICS, "a", script={Method.UPDATE_WEIGHTS: SILENT}) as a:
        operation = client.submit("update_weights", {"version": "v2"}, deadline_s=30)
        void = make_request("d-1", "decide", {"request_id": operation.request_id, "decision": "void"})
        value, headers = encode_request(void)
        broker.writer("x").append(OutRecord(TOPICS.control_requests, value, b"d-1", headers)).result(5)
        waiting = Background(lambda: operation.wait(30))
        wait_until(lambda: operation.outcome().decision == "void", what="the decision read back")
        update = wait_until(lambda: [r for r in a.seen if r.method is Method.UPDATE_WEIGHTS], 30, "the command read")[0]
        a.answer(update, operation.position.offset, Reply(Phase.STAGED))
        a.answer(update, operation.position.offset, Reply(code=Code.FAILED, message="voided"))
        assert waiting.result().decision == "void"
        assert "commit" not in decisions(a)


def test_any_client_reads_the_outcome_later(broker: MemoryBroker, client: ControlClient) -> None:
    with FakeWorker(broker, TOPICS, "a"):
        outcome = client.pause(request_id="p-1")
    with ControlClient(broker, TOPICS) as second:
        assert second.operation("p-1") == outcome
        with pytest.raises(UnknownOperation, match="p-2"):
            second.operation("p-2")
        with pytest.raises(UnknownOperation, match="p-2"):
            second.trace("p-2")
        trace = second.trace("p-1")
        assert trace.outcome == outcome
        assert trace.events[0].what == "published"
        assert sorted(event.what for event in trace.events[1:]) == ["accepted", "done", "expected"]


def test_the_same_command_again_takes_the_first_answers(broker: MemoryBroker, client: ControlClient) -> None:
    with FakeWorker(broker, TOPICS, "a") as a:
        first = client.pause(request_id="p-1", target="a")
    with FakeWorker(broker, TOPICS, "b"), ControlClient(broker, TOPICS) as second:
        assert second.pause(request_id="p-1", target="a") == first
        assert first.position is not None
        assert [e.what for e in second.trace("p-1").events].count("duplicate") == 1
        other = second.submit("resume", request_id="p-1", target="b")
        assert other.position.offset > first.position.offset
        assert other.wait(10).responses.keys() == {"b"}
    assert [r.request_id for r in a.seen if r.method is Method.PAUSE] == ["p-1"]


def test_answers_to_another_digest_are_ignored(broker: MemoryBroker, client: ControlClient) -> None:
    script = {Method.PAUSE: (Reply(digest="0" * 64), Reply(code=Code.ALREADY))}
    with FakeWorker(broker, TOPICS, "a", script=script):
        assert client.pause().responses["a"].code is Code.ALREADY


def test_what_cannot_be_sent_is_refused_before(broker: MemoryBroker, client: ControlClient) -> None:
    with FakeWorker(broker, TOPICS, "a") as a:
        noise = {"noise": "".join(uuid.uuid4().hex for _ in range(60_000))}
        calls: list[Callable[[], object]] = [
            lambda: client.sleep(["gpu"]),
            lambda: client.pause(target="role=="),
            lambda: client.pause(request_id=""),
            lambda: client.pause(min_ok=0),
            lambda: client.call("fly"),
            lambda: client.call("hello", {"worker": "a", "boot": "b", "engine": "e"}),
            lambda: client.call("decide", {"request_id": "x", "decision": "void"}),
            lambda: client.abort_requests([]),
            lambda: client.abort_requests(),
            lambda: client.transfer_weights("update", info=noise),
            lambda: client.pause(timeout=-1),
        ]
        for call in calls:
            with pytest.raises((InvalidInput, RecordTooLarge)):
                call()
        client.status()
        assert [str(r.method) for r in a.seen] == ["hello", "status"]


def test_history_and_workers(broker: MemoryBroker, client: ControlClient) -> None:
    with FakeWorker(broker, TOPICS, "b", ROLLOUT), FakeWorker(broker, TOPICS, "a"):
        client.pause(request_id="p-1")
        client.update_weights("v2", request_id="u-1")
        client.resume(request_id="r-1", target="gone", check=False)
        shown = [(e.request.request_id, e.outcome.status, e.outcome.decision) for e in client.history(2)]
        assert shown == [("u-1", "ok", "commit"), ("r-1", "no_targets", None)]
        assert len(client.history(100)) == 3
        assert [(view.member_id, view.live) for view in client.workers()] == [("a", True), ("b", True)]


def test_no_broker_is_said_in_time(broker: MemoryBroker) -> None:
    with broker.outage(), pytest.raises(BrokerUnavailable), ControlClient(broker, TOPICS, connect_timeout=0.05):
        raise AssertionError("entered without a broker")


def test_missing_topics_are_named() -> None:
    with pytest.raises(TopicMissing, match=r"t\.control\.requests\.v1"), ControlClient(MemoryBroker(), TOPICS):
        raise AssertionError("entered without topics")


def test_closing_twice_and_before_the_first_use(broker: MemoryBroker) -> None:
    client = ControlClient(broker, TOPICS)
    client.close()
    client.close()


def test_rubbish_in_every_topic_is_survived(broker: MemoryBroker, client: ControlClient) -> None:
    writer = broker.writer("x")
    for topic in (TOPICS.control_requests, TOPICS.control_responses, TOPICS.members):
        for value in (b"", b"[]", b"\xff", b'{"request_id":"p-1"}', None):
            writer.append(OutRecord(topic, value, b"p-1")).result(5)
    with FakeWorker(broker, TOPICS, "a"):
        operation = client.submit("pause", request_id="p-1")
        writer.append(OutRecord(TOPICS.control_responses, b'{"request_id":"p-1","status":200}', b"p-1")).result(5)
        assert operation.wait(10).status == "ok"
        assert client.trace("p-1").outcome is not None


def test_an_answer_without_a_code_is_no_success(broker: MemoryBroker, client: ControlClient) -> None:
    """Whatever else it says: the worker is named as one that gave no answer."""
    writer = broker.writer("x")
    with FakeWorker(broker, TOPICS, "a"), FakeWorker(broker, TOPICS, "b", script={Method.PAUSE: SILENT}) as b:
        operation = client.submit("pause", deadline_s=0.5)
        request = wait_until(lambda: [r for r in b.seen if r.method is Method.PAUSE], 30, "the command")[0]
        whole = ControlResponse(
            request_id=request.request_id, request_digest=request.digest, request_offset=operation.position.offset,
            worker_id="b", boot_id="b1", phase=Phase.DONE, code=Code.OK, error_code=200, message="success",
        )  # fmt: skip
        fields = whole.model_dump(mode="json", exclude_none=True)
        for missing in ({"code"}, {"code", "error_code"}):
            value = json.dumps({name: fields[name] for name in fields.keys() - missing}).encode()
            writer.append(OutRecord(TOPICS.control_responses, value, request.request_id.encode())).result(5)
        outcome = operation.wait()
        assert (outcome.status, outcome.missing, tuple(outcome.responses)) == ("timeout", ("b",), ("a",))
        value, headers = encode_response(whole)
        writer.append(OutRecord(TOPICS.control_responses, value, request.request_id.encode(), headers)).result(5)
        late = wait_until(lambda: client.operation(request.request_id).responses.get("b"), 30, "its answer with a code")
        assert late is not None
        assert late.code is Code.OK


def test_operations_are_measured(broker: MemoryBroker) -> None:
    metrics = Metrics()
    with (
        ControlClient(broker, TOPICS, metrics=metrics) as client,
        FakeWorker(broker, TOPICS, "a", script={Method.PAUSE: OK}),
    ):
        client.pause()
        client.resume(target="nobody", check=False)
    assert metrics.value("moebus_control_operations_total", method="pause", status="ok") == 1
    assert metrics.value("moebus_control_operations_total", method="resume", status="no_targets") == 1
    assert metrics.value("moebus_control_operation_duration_seconds_count", method="pause") == 1


def test_a_port_without_a_broker_is_said_in_time() -> None:
    settings = load_settings(kafka={"bootstrap_servers": "127.0.0.1:1"})
    with (
        pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1:1"),
        ControlClient.from_settings(settings, connect_timeout=0.5),
    ):
        raise AssertionError("entered without a broker")


def test_an_update_that_nobody_could_stage_says_void(broker: MemoryBroker, client: ControlClient) -> None:
    script = refusing(Method.UPDATE_WEIGHTS, Code.INVALID, "bad file")
    with FakeWorker(broker, TOPICS, "a", script=script), pytest.raises(FleetError, match="bad file") as caught:
        client.update_weights("v2")
    assert caught.value.outcome.decision == "void"
    assert caught.value.http_status == 400


def test_an_outage_after_the_command_ends_with_timeout(broker: MemoryBroker, client: ControlClient) -> None:
    with FakeWorker(broker, TOPICS, "a", script={Method.PAUSE: SILENT}) as a:
        operation = client.submit("pause", deadline_s=0.05)
        wait_until(lambda: len(a.seen) == 2, what="the command read")
        with broker.outage():
            outcome = operation.wait(0.05)
            assert (outcome.status, outcome.missing, outcome.decision) == ("timeout", ("a",), None)
        assert wait_until(lambda: decisions(a), what="the void after the outage") == ["void"]
