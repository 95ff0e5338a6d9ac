"""What fleets of other systems get wrong: the rows of docs/control-requirements.md that no other test shows."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from moebus.broker.ports import LogRecord
from moebus.consumers.control.log_index import LogIndex
from moebus.engine.port import EngineFailed, EngineRefused
from moebus.observability.clock import ManualClock
from moebus.schemas.control import encode_request, make_request
from moebus.schemas.members import decode_member
from moebus.schemas.responses import Code, Lifecycle, Phase
from tests.support.background import Background
from tests.support.control_lab import Lab
from tests.support.gate import Gate
from tests.support.wait import wait_until


def update(lab: Lab, version: str, **fields: Any) -> str:
    """A committed update."""
    request_id = lab.send("update_weights", {"version": version, "source": lab.file(version)}, **fields)
    lab.turn()
    lab.decide(request_id)
    return request_id


@pytest.mark.parametrize("last", ["pause", "resume"])
def test_the_last_of_many_interleaved_commands_counts_everywhere(lab: Lab, last: str) -> None:
    """R1, C20: two controllers write at once; the log orders them, and every worker obeys in that order."""
    engines = [lab.engine() for _ in range(3)]
    for number, engine in enumerate(engines):
        lab.host(engine, ids=(f"w{number}",))

    def controller(name: str) -> None:
        for number in range(20):
            lab.send("pause" if number % 2 else "resume", id=f"{name}-{number}")

    writing = [Background(lambda name=name: controller(name)) for name in ("a", "b")]  # type: ignore[misc]
    for one in writing:
        one.result()
    lab.send(last)
    lab.turn(5)
    assert {engine.inspect().paused for engine in engines} == {last == "pause"}


@pytest.mark.parametrize("method", ["sleep", "update_weights"])
def test_the_same_record_ten_times_has_one_effect_and_ten_equal_answers(lab: Lab, method: str) -> None:
    """R2, F3."""
    gate = Gate()
    lab.host(lab.engine(gate=gate))
    lab.ask("pause")
    args = {"version": "v2", "source": lab.file("v2")} if method == "update_weights" else {"tags": "kv_cache"}
    for _ in range(10):
        lab.send(method, args, id="same")
    lab.turn()
    if method == "update_weights":
        lab.decide("same")
        for _ in range(9):
            lab.send(method, args, id="same")
        lab.turn()
    answers = lab.answers("same")
    assert len(answers) == 10
    assert len(set(map(str, answers))) == 1
    effect = "commit" if method == "update_weights" else "sleep"
    assert [name for name, _ in gate.calls].count(effect) == 1


def test_a_repeat_joins_the_running_operation(lab: Lab) -> None:
    """F8: the client gave up waiting and sends the same id again while the first one still runs."""
    gate = Gate()
    host = lab.host(lab.engine(gate=gate), threads=True).start()
    try:
        wait_until(lambda: lab.health.ready() == {}, 30, "ready")
        gate.close_after("sleep", 0)
        lab.send("sleep", {"tags": "kv_cache"}, id="s", deadline_s=600)
        gate.wait_held()
        lab.send("sleep", {"tags": "kv_cache"}, id="s", deadline_s=600)
        gate.open()
        wait_until(lambda: len(lab.answers("s")) == 2, 30, "both answers")
        assert [name for name, _ in gate.calls].count("sleep") == 1
        assert lab.answers("s")[0] == lab.answers("s")[1]
    finally:
        gate.open()
        host.stop()


def test_a_controller_of_an_older_run_cannot_command(lab: Lab) -> None:
    """R3, F4, #10: the run is the epoch; who missed that a new one began is told so."""
    engine = lab.engine()
    lab.host(engine)
    lab.ask("begin_run", {"run": "r1"})
    lab.ask("begin_run", {"run": "r2"})
    old = lab.ask("resume", run="r1")
    assert (old.code, old.message) == (Code.CONFLICT, "run 'r1' is not the current one ('r2')")
    assert lab.ask("begin_run", {"run": "r1"}).code is Code.CONFLICT, "and it cannot begin again"
    assert engine.inspect().paused
    assert lab.ask("resume", run="r2").code is Code.OK


def test_a_resume_that_failed_is_done_truly_by_the_next(lab: Lab) -> None:
    """F10: what was half done is no reason to say `already`."""
    engine = lab.engine()
    lab.host(engine)
    lab.ask("pause")
    engine.fail_next("resume", EngineFailed("the cache transfer did not resume"))
    failed = lab.ask("resume")
    assert failed.code is Code.FAILED
    assert failed.state is not None
    assert failed.state.lifecycle is Lifecycle.PAUSED
    assert lab.ask("resume").code is Code.OK
    assert not engine.inspect().paused


def test_one_of_twenty_that_cannot_stage_leaves_all_at_the_old_version(lab: Lab) -> None:
    """R18, #11: an update is for every target or for none."""
    engines = [lab.engine() for _ in range(20)]
    lab.host(*engines, ids=tuple(f"w{n}" for n in range(20)))
    lab.ask("pause")
    engines[7].fail_next("stage", EngineRefused("disk read error"))
    request_id = lab.send("update_weights", {"version": "v2", "source": lab.file("v2")})
    lab.turn()
    assert len(lab.answers(request_id, phase=Phase.STAGED)) == 19
    lab.decide(request_id, "void")
    assert {engine.inspect().version for engine in engines} == {"initial"}
    assert {answer.code for answer in lab.answers(request_id)} == {Code.FAILED}
    assert lab.ask("resume").code is Code.OK


def test_a_wake_in_two_steps_serves_only_at_the_end(lab: Lab) -> None:
    """R11, F18, #1, #4: the cache first, the weights second, as CUDA graphs need it; both answers say what is left."""
    engine = lab.engine()
    lab.host(engine)
    lab.ask("sleep")
    for tag, left in (("kv_cache", "weight is asleep"), ("weight", "")):
        assert lab.ask("wakeup", {"tags": tag}).code is Code.OK
        assert engine.inspect().paused
        resumed = lab.ask("resume")
        assert (resumed.code, resumed.message) == ((Code.ILLEGAL_STATE, left) if left else (Code.OK, ""))
    assert not engine.inspect().paused


def test_two_updates_at_once(lab: Lab) -> None:
    """#7: one wins, the other one is told by whom and where."""
    engine = lab.engine()
    lab.host(engine)
    lab.ask("pause")
    won = lab.send("update_weights", {"version": "a", "source": lab.file("a")}, id="won")
    lost = lab.send("update_weights", {"version": "b", "source": lab.file("b")}, id="lost")
    lab.turn()
    offset = lab.answer(won).request_offset
    refused = lab.answer(lost)
    assert refused.code is Code.CONFLICT
    assert refused.message == f"the update at offset {offset} is staged and not decided: request 'won'"
    lab.decide(won)
    stale = lab.ask("update_weights", {"version": "c"}, expect={"version": "initial"})
    assert stale.message == f"expect.version='initial': the weights are 'a' by request 'won' at offset {offset}"
    assert engine.inspect().version == "a"


@pytest.mark.parametrize(
    ("args", "code"),
    [({"ids": []}, Code.INVALID), ({}, Code.INVALID), ({"ids": None}, Code.INVALID), ({"all": True}, Code.OK)],
)
def test_no_ids_is_not_everybody(lab: Lab, args: dict[str, Any], code: Code) -> None:
    """#8: an empty list, a missing and a null one each have a written meaning, and none of them aborts everything."""
    lab.host(lab.engine())
    lab.send_raw(json.dumps({"request_id": "a", "method": "abort_requests", "args": args}).encode())
    lab.turn()
    assert lab.answer("a").code is code


def test_the_cache_is_reset_over_frozen_requests(lab: Lab) -> None:
    """#5: a reset does not wait for requests that wait."""
    gate = Gate()
    engine = lab.engine(gate=gate)
    lab.host(engine)
    assert lab.ask("pause", {"mode": "keep"}).code is Code.OK
    assert lab.ask("reset_cache").code is Code.OK


@pytest.mark.parametrize("skew_s", [-86_400, 86_400])
def test_deadlines_are_those_of_the_broker_whatever_the_workers_clock_says(lab: Lab, skew_s: int) -> None:
    """R28: a day ahead or behind on the worker's machine; time itself passes alike."""

    right = lab.clock

    class Skewed(ManualClock):
        def monotonic(self) -> float:
            return right.monotonic()

        def now_ms(self) -> int:
            return right.now_ms() + skew_s * 1000

    engine = lab.engine()
    lab.clock = Skewed()
    lab.host(engine)
    lab.clock = right
    assert lab.ask("pause", deadline_s=5).code is Code.OK
    request_id = lab.send("resume", deadline_s=5)
    lab.clock.advance(5.5)
    lab.turn()
    assert lab.answer(request_id).code is Code.EXPIRED
    assert engine.inspect().paused


def test_sixty_seconds_of_an_operation(lab: Lab) -> None:
    """R16, R25, F17: heartbeats go on, `status` answers within a second, and it says what goes on and until when."""
    gate = Gate()
    host = lab.host(lab.engine(gate=gate), threads=True).start()
    try:
        wait_until(lambda: lab.health.ready() == {}, 30, "ready")
        gate.close_after("sleep", 0)
        long = lab.send("sleep", deadline_s=120)
        gate.wait_held()
        slowest = 0.0
        for second in range(0, 60, 4):
            beats = len(lab.records(lab.topics.members))
            lab.clock.advance(4.0)
            wait_until(lambda beats=beats: len(lab.records(lab.topics.members)) > beats, 30, "a heartbeat")  # type: ignore[misc]
            slowest = max(slowest, seconds_of_status(lab) if second % 12 == 0 else 0.0)
        assert lab.answers(long) == [], "sixty seconds later it still runs"
        assert slowest < 1.0
        last = [r for r in lab.records(lab.topics.members) if r.key == b"w1"][-1]
        member = decode_member(last.value or b"", last.headers)
        assert member.operation is not None
        assert member.operation.request_id == long
        assert member.busy_until is not None
        assert member.busy_until > last.timestamp_ms
        gate.open()
        wait_until(lambda: lab.answers(long), 30, "its end")
    finally:
        gate.open()
        host.stop()


def seconds_of_status(lab: Lab) -> float:
    """How long one `status` takes; the least of three, since other processes use this machine too."""
    taken = []
    for _ in range(3):
        started = time.monotonic()
        request_id = lab.send("status")
        wait_until(lambda request_id=request_id: lab.answers(request_id), 30, "status", step=0.001)  # type: ignore[misc]
        taken.append(time.monotonic() - started)
        if taken[-1] < 0.5:
            break
    return min(taken)


def test_what_a_worker_keeps_of_many_commands(lab: Lab) -> None:
    """R24: identities are kept for ever, in less than 1 KB each; nothing else grows."""
    index = LogIndex()
    values = [encode_request(make_request(f"control-{n:036}", "pause", {"mode": "wait"})) for n in range(2_500)]
    records = [LogRecord("t", 0, n, n, b"k", value, tuple(headers)) for n, (value, headers) in enumerate(values)]
    for record in records[:500]:
        index.add(record)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for record in records[500:]:
        index.add(record)
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(index.identities) == 2_500
    assert grown < 2_000 * 1024
    host = lab.host(lab.engine())
    for number in range(300):
        lab.send("pause" if number % 2 else "resume")
    lab.turn()
    (seat,) = host._seats
    assert len(seat.worker.answers._kept) <= 256
    assert len(seat.worker.reporter._ops) <= 8
    assert (host._history, seat.executor.waiting) == ([], 0)


def test_a_replacement_serves_only_at_the_fleets_version(lab: Lab) -> None:
    """#9, C17: a new engine with the weights of the start joins mid-run; it is not ready until it has caught up."""
    lab.host(lab.engine(), labels={"role": "rollout"})
    lab.ask("pause")
    update(lab, "v2")
    lab.ask("resume")
    engine, seen = lab.engine(), []

    def hook(point: str, subject: str, deadline: object) -> None:
        if point in ("stage", "commit"):
            member = lab.member("w9")
            seen.append((point, engine.inspect().paused, member is not None and member.ready))

    engine.hook = hook
    lab.host(engine, ids=("w9",), labels={"role": "rollout"})
    assert seen == [("stage", True, False), ("commit", True, False)]
    assert (engine.inspect().version, engine.inspect().paused) == ("v2", False)


def test_a_record_in_the_log_is_read_by_every_process(lab: Lab, tmp_path: Path) -> None:
    """#14: no consumer group: a second process beside the first takes nothing away from it."""
    engines = [lab.engine() for _ in range(2)]
    for number, engine in enumerate(engines):
        lab.host(engine, ids=(f"w{number}",))
    request_id = lab.send("pause")
    lab.turn()
    assert {answer.worker_id for answer in lab.answers(request_id)} == {"w0", "w1"}
    assert all(engine.inspect().paused for engine in engines)


def test_every_line_about_an_operation_has_its_ids(lab: Lab, caplog: pytest.LogCaptureFixture) -> None:
    """R21: one grep for the id shows the operation with its sub-steps, where it lies in the log, and its end."""
    caplog.set_level("INFO", "moebus.consumers.control")
    lab.host(lab.engine())
    answer = lab.ask("sleep", id="s-1")
    lines = [record.__dict__ for record in caplog.records if record.__dict__["fields"].get("request_id") == "s-1"]
    assert [line["action"] for line in lines] == ["control.step"] * 3 + ["control.done"]
    assert [line["message"] for line in lines] == ["pause", "sleep weight", "sleep kv_cache", "ok"]
    where = f"{lab.topics.control_requests}/0/{answer.request_offset}"
    assert {(line["fields"]["position"], line["fields"]["worker_id"]) for line in lines} == {(where, "w1")}
