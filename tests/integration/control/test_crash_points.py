"""A crash at each fault point: one effect and one answer, with the engine surviving and with the engine lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebus.engine.hooks import no_hook
from moebus.engine.port import EngineTainted, EngineTimeout, Prompt
from moebus.engine.simulated import SimulatedEngine
from moebus.engine.waiting import Never
from moebus.schemas.responses import Code, Lifecycle
from tests.support.background import Background
from tests.support.control_lab import Crash, CrashAt, Lab
from tests.support.gate import Gate
from tests.support.wait import wait_until

POINTS = ("after_read", "after_state", "mid_effect", "after_effect", "after_response", "after_second_state")
ONE_STEP = tuple(point for point in POINTS if point != "mid_effect")
COMMANDS: dict[str, tuple[dict[str, Any] | None, Lifecycle, bool]] = {
    # method -> args, lifecycle afterwards, whether both tags are resident
    "pause": (None, Lifecycle.PAUSED, True),
    "sleep": (None, Lifecycle.PAUSED, False),
    "reset_cache": (None, Lifecycle.RUNNING, True),
    "begin_run": ({"run": "exp"}, Lifecycle.PAUSED, True),
}


def crash_during(lab: Lab, engine: SimulatedEngine, point: str, method: str, args: Any, skip: int = 0) -> str | None:
    """The id of the command whose handling ended in a crash; None where the point was not reached."""
    fault = CrashAt(point, skip)
    host = lab.host(engine, fault=fault)
    fault.armed = True
    request_id = lab.send(method, args)
    try:
        lab.turn()
    except Crash:
        lab.crash(host)
        return request_id
    return None


def restart(lab: Lab, engine: SimulatedEngine, lost: bool) -> None:
    if lost:
        engine.lose()
    lab.silence()
    lab.host(engine)


@pytest.mark.parametrize("lost", [False, True], ids=["survives", "lost"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("method", COMMANDS)
def test_commands(lab: Lab, method: str, point: str, lost: bool) -> None:
    args, lifecycle, resident = COMMANDS[method]
    engine = lab.engine()
    request_id = crash_during(lab, engine, point, method, args)
    if request_id is None:
        assert point == "mid_effect", "only a command of one step has no middle"
        return
    restart(lab, engine, lost)
    answers = lab.answers(request_id)
    assert answers[0].code is Code.OK
    assert len(answers) == 1
    found = engine.inspect()
    assert found.paused is (lifecycle is not Lifecycle.RUNNING)
    assert set(found.resident.values()) == {resident}
    member = lab.member()
    assert member is not None
    assert member.state is not None
    assert (member.state.lifecycle, member.ready, member.operation) == (lifecycle, True, None)


@pytest.mark.parametrize("lost", [False, True], ids=["survives", "lost"])
@pytest.mark.parametrize("point", POINTS)
def test_resume_and_wakeup(lab: Lab, point: str, lost: bool) -> None:
    engine = lab.engine()
    first = lab.host(engine)
    assert lab.ask("sleep", {"tags": "kv_cache"}).code is Code.OK
    lab.crash(first)
    lab.silence()
    request_id = crash_during(lab, engine, point, "wakeup", {"resume": True})
    assert request_id is not None
    restart(lab, engine, lost)
    assert [answer.code for answer in lab.answers(request_id)] == [Code.OK]
    assert not engine.inspect().paused
    assert all(engine.inspect().resident.values())


@pytest.mark.parametrize("lost", [False, True], ids=["survives", "lost"])
@pytest.mark.parametrize("point", ONE_STEP)
def test_abort_is_not_repeated(lab: Lab, point: str, lost: bool) -> None:
    gate = Gate()
    engine = lab.engine(gate=gate)
    request_id = crash_during(lab, engine, point, "abort_requests", {"all": True})
    assert request_id is not None
    restart(lab, engine, lost)
    codes = [answer.code for answer in lab.answers(request_id)]
    in_doubt = point in ("after_state", "after_effect")
    assert codes == [Code.UNKNOWN if in_doubt else Code.OK]
    assert [name for name, _ in gate.calls].count("abort_requests") == (0 if point == "after_state" else 1)


@pytest.mark.parametrize("lost", [False, True], ids=["survives", "lost"])
@pytest.mark.parametrize("point", ONE_STEP)
def test_stage(lab: Lab, point: str, lost: bool) -> None:
    engine, source = lab.engine(), lab.file("v2")
    first = lab.host(engine)
    lab.ask("pause")
    lab.crash(first)
    lab.silence()
    update = crash_during(lab, engine, point, "update_weights", {"version": "v2", "source": source})
    assert update is not None
    restart(lab, engine, lost)
    assert lab.answer(update).result is not None
    assert engine.inspect().version == "initial"
    lab.decide(update)
    assert [answer.code for answer in lab.answers(update)] == [Code.OK]
    assert engine.inspect().version == "v2"


@pytest.mark.parametrize("lost", [False, True], ids=["survives", "lost"])
@pytest.mark.parametrize("point", ONE_STEP)
def test_commit(lab: Lab, point: str, lost: bool) -> None:
    gate = Gate()
    engine, source = lab.engine(gate=gate), lab.file("v2")
    fault = CrashAt(point)
    host = lab.host(engine, fault=fault)
    lab.ask("pause")
    update = lab.send("update_weights", {"version": "v2", "source": source})
    lab.turn()
    fault.armed = True
    lab.send("decide", {"request_id": update, "decision": "commit"})
    with pytest.raises(Crash):
        lab.turn()
    lab.crash(host)
    restart(lab, engine, lost)
    assert [answer.code for answer in lab.answers(update)] == [Code.OK]
    found = engine.inspect()
    assert (found.version, found.weights_valid, found.paused) == ("v2", True, True)
    if not lost:
        assert [name for name, _ in gate.calls].count("commit") == 1
    assert lab.ask("resume").code is Code.OK


def end_of_transfer(step: str, point: str, lost: bool) -> tuple[Code, Code]:
    """The only answer to the step that a crash met, and what a resume answers afterwards."""
    again = point == "after_read"  # nothing was done: the step is done now, where there is a transfer to go on with
    doubtful = point in ("after_state", "after_effect")
    if lost:
        if step == "start" and again:
            return Code.OK, Code.ILLEGAL_STATE
        return Code.ILLEGAL_STATE if again else Code.BEHIND if doubtful else Code.OK, Code.BEHIND
    if doubtful and (step, point) != ("finish", "after_effect"):
        return Code.TAINTED, Code.TAINTED
    return Code.OK, Code.OK if step == "finish" else Code.ILLEGAL_STATE


@pytest.mark.parametrize("lost", [False, True], ids=["survives", "lost"])
@pytest.mark.parametrize("point", ONE_STEP)
@pytest.mark.parametrize("step", ["start", "update", "finish"])
def test_transfer(lab: Lab, step: str, point: str, lost: bool) -> None:
    """A transfer cut in the middle cannot be repeated: TAINTED where the memory stays, BEHIND where it is fresh."""
    engine, fault = lab.engine(), CrashAt(point)
    host = lab.host(engine, fault=fault)
    lab.ask("pause")
    for name in ("start", "update", "finish"):
        fault.armed = name == step
        request_id = lab.send("transfer_weights", {"step": name, "version": "v2", "info": {"names": ["a"]}})
        if name == step:
            with pytest.raises(Crash):
                lab.turn()
            break
        lab.turn()
    lab.crash(host)
    restart(lab, engine, lost)
    code, resumed = end_of_transfer(step, point, lost)
    assert [answer.code for answer in lab.answers(request_id)] == [code]
    assert engine.inspect().paused
    assert lab.ask("resume").code is resumed
    assert engine.inspect().paused is (resumed is not Code.OK)
    lab.ask("pause")
    update = lab.send("update_weights", {"version": "v3", "source": lab.file("v3")})
    lab.turn()
    lab.decide(update)
    assert lab.answer(update).code is Code.OK
    assert lab.ask("resume").code is Code.OK
    assert engine.inspect().version == "v3"


@pytest.mark.parametrize("lost", [False, True], ids=["survives", "lost"])
@pytest.mark.parametrize("point", ONE_STEP)
def test_init_of_a_transfer_is_not_repeated(lab: Lab, point: str, lost: bool) -> None:
    engine, fault = lab.engine(), CrashAt(point)
    host = lab.host(engine, fault=fault)
    lab.ask("pause")
    fault.armed = True
    request_id = lab.send("transfer_weights", {"step": "init", "info": {"rank": 0}})
    with pytest.raises(Crash):
        lab.turn()
    lab.crash(host)
    restart(lab, engine, lost)
    in_doubt = point in ("after_state", "after_effect")
    assert [answer.code for answer in lab.answers(request_id)] == [Code.UNKNOWN if in_doubt else Code.OK]
    assert lab.ask("resume").code is Code.OK


@pytest.mark.parametrize("lost", [False, True], ids=["survives", "lost"])
@pytest.mark.parametrize("point", ONE_STEP)
def test_resume(lab: Lab, point: str, lost: bool) -> None:
    gate = Gate()
    engine = lab.engine(gate=gate)
    first = lab.host(engine)
    lab.ask("pause")
    lab.crash(first)
    lab.silence()
    request_id = crash_during(lab, engine, point, "resume", None)
    assert request_id is not None
    restart(lab, engine, lost)
    assert [answer.code for answer in lab.answers(request_id)] == [Code.OK]
    assert not engine.inspect().paused
    if not lost:
        assert [name for name, _ in gate.calls].count("resume") == 1


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
@pytest.mark.parametrize("point", ONE_STEP)
def test_a_pause_keeps_its_mode(lab: Lab, point: str, mode: str) -> None:
    """The engine lives on beside the worker, with a request inside: the successor drains it as the command says."""
    gate = Gate()
    engine = lab.engine(gate=gate)
    gate.close_after("step", 2)
    call = Background(lambda: engine.generate(Prompt("g1", np.arange(5), max_tokens=6), 1e9))
    gate.wait_held()
    fault = CrashAt(point)
    host = lab.host(engine, fault=fault)
    fault.armed = True
    request_id = lab.send("pause", {"mode": mode}, deadline_s=600)
    crashing = Background(lambda: ended_by_a_crash(lab))
    if point not in ("after_read", "after_state"):
        wait_until(lambda: engine.inspect().paused, what="the pause")
        gate.open()
    assert crashing.result()
    lab.crash(host)
    lab.silence()
    again = Background(lambda: lab.host(engine))
    wait_until(lambda: engine.inspect().paused, what="the pause")
    gate.open()
    again.result()
    assert [answer.code for answer in lab.answers(request_id)] == [Code.OK]
    member = lab.member()
    assert member is not None
    assert member.state is not None
    assert (member.state.lifecycle, member.ready) == (Lifecycle.PAUSED, True)
    assert engine.inspect().frozen == (1 if mode == "keep" else 0)
    assert lab.ask("resume").code is Code.OK
    assert call.result().finish_reason == ("abort" if mode == "abort" else "length")


def test_a_pause_that_fails_again_after_the_crash_leaves_the_engine_serving(lab: Lab) -> None:
    engine = lab.engine()
    request_id = crash_during(lab, engine, "after_state", "pause", {"mode": "wait"})
    assert request_id is not None
    engine.fail_next("pause", EngineTimeout("2 requests still ran"))
    restart(lab, engine, lost=False)
    assert [(answer.code, answer.message) for answer in lab.answers(request_id)] == [
        (Code.TIMEOUT, "2 requests still ran")
    ]
    assert not engine.inspect().paused
    assert lab.health.ready() == {}
    assert lab.ask("pause").code is Code.OK


def ended_by_a_crash(lab: Lab) -> bool:
    try:
        lab.turn()
    except Crash:
        return True
    return False


@pytest.mark.parametrize("source_stays", [True, False], ids=["source", "no source"])
@pytest.mark.parametrize("mixed", [False, True], ids=["whole", "mixed"])
def test_inside_a_commit(lab: Lab, mixed: bool, source_stays: bool) -> None:
    """Cut off in the write: loaded again from the source, else TAINTED where memory may be mixed, else BEHIND."""
    engine, source = lab.engine(), lab.file("v2")
    host = lab.host(engine)
    lab.ask("pause")
    update = lab.send("update_weights", {"version": "v2", "source": source})
    lab.turn()

    def hook(point: str, subject: str, deadline: object) -> None:
        if point == "commit":
            raise Crash(point)

    engine.hook = hook
    lab.send("decide", {"request_id": update, "decision": "commit"})
    with pytest.raises(Crash):
        lab.turn()
    lab.crash(host)
    engine.hook = no_hook
    if mixed:
        engine.fail_next("transfer", EngineTainted("half written"))
        with pytest.raises(EngineTainted):
            engine.transfer("start", None, {}, Never())
    if not source_stays:
        Path(source).unlink()
    restart(lab, engine, lost=False)
    code = Code.OK if source_stays else Code.TAINTED if mixed else Code.BEHIND
    assert [answer.code for answer in lab.answers(update)] == [code]
    assert engine.inspect().paused
    assert lab.ask("resume").code is code
