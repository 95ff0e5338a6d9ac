"""A worker beside a server: what it answers when calls are lost, refused or late, and when the server dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moebus.schemas.responses import Code, ControlResponse, Lifecycle, Residency
from moebus.schemas.tags import Tag
from tests.support.control_lab import Crash, CrashAt, Lab
from tests.support.vllm import Rig, rigs
from tests.support.wait import wait_until


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with rigs(tmp_path) as new:
        yield new()


def begun(lab: Lab, rig: Rig) -> ControlResponse:
    """A worker that serves."""
    lab.host(rig.engine)
    return lab.ask("status")


def update(lab: Lab, rig: Rig, version: str) -> ControlResponse:
    request = lab.send("update_weights", {"version": version, "source": rig.checkpoint(version)})
    lab.turn()
    lab.decide(request)
    return lab.answer(request)


def transfer(lab: Lab, version: str) -> None:
    for step in ("init", "start", "update", "finish"):
        answer = lab.ask("transfer_weights", {"step": step, "version": version, "info": {"weights": version}})
        assert answer.code is Code.OK, answer.message


def lifecycle(lab: Lab) -> Lifecycle | None:
    member = lab.member()
    return None if member is None or member.state is None else member.state.lifecycle


def beat(lab: Lab) -> None:
    lab.clock.advance(2.0)
    lab.turn()


def test_what_it_answers_when_all_is_well(lab: Lab, rig: Rig) -> None:
    begun(lab, rig)
    slept = lab.ask("sleep")
    assert slept.code is Code.OK
    assert slept.result is not None
    assert slept.result["tags"] == {"weight": {"outcome": "done"}, "kv_cache": {"outcome": "done"}}, (
        "no bytes: not told"
    )
    assert slept.state is not None
    assert slept.state.tags == dict.fromkeys(Tag, Residency.ASLEEP)
    assert lab.ask("wakeup", {"tags": "weight"}).code is Code.OK
    refused = lab.ask("resume")
    assert (refused.code, refused.message) == (Code.ILLEGAL_STATE, "kv_cache is asleep")
    woken = lab.ask("wakeup", {"resume": True})
    assert woken.state is not None
    assert (woken.code, woken.state.lifecycle, woken.state.version) == (Code.OK, Lifecycle.RUNNING, "default")
    assert rig.ask()["weights"] == "w0"


@pytest.mark.parametrize("tag", list(Tag))
def test_one_tag_alone_cannot_sleep(lab: Lab, rig: Rig, tag: Tag) -> None:
    begun(lab, rig)
    answer = lab.ask("sleep", {"tags": str(tag)})
    assert (answer.code, answer.error_code) == (Code.UNSUPPORTED, 501)
    assert "alone" in answer.message
    assert lifecycle(lab) is Lifecycle.RUNNING
    assert rig.server.faults.count("/pause") == rig.server.faults.count("/sleep") == 0
    lab.ask("sleep")
    lab.ask("wakeup", {"tags": str(tag)})
    assert lab.ask("sleep", {"tags": str(tag)}).code is Code.OK, "the other one sleeps already"


def test_a_digest_is_unsupported(lab: Lab, rig: Rig) -> None:
    begun(lab, rig)
    lab.ask("pause")
    answer = lab.ask("update_weights", {"version": "v2", "digest": "0" * 32})
    assert (answer.code, answer.message.split(":")[0]) == (Code.UNSUPPORTED, "digest")


def test_a_lost_answer_that_nothing_proves_is_unknown_and_put_right(lab: Lab, rig: Rig) -> None:
    begun(lab, rig)
    rig.server.bugs.no_stats = True  # nothing says whether it sleeps
    rig.server.faults.cut["/sleep"] = "after"
    answer = lab.ask("sleep")
    assert (answer.code, answer.error_code) == (Code.UNKNOWN, 502)
    rig.server.faults.cut.clear()
    lab.turn()
    assert rig.server.core.asleep == set()
    assert lab.ask("sleep").code is Code.OK


@pytest.mark.parametrize(("when", "code", "state"), [("after", Code.OK, "PAUSED"), ("before", Code.FAILED, "RUNNING")])
def test_a_lost_answer_is_resolved_by_inspection(lab: Lab, rig: Rig, when: str, code: Code, state: str) -> None:
    begun(lab, rig)
    rig.server.faults.cut["/pause"] = when  # type: ignore[assignment]
    assert lab.ask("pause").code is code
    assert str(lifecycle(lab)) == state
    assert rig.engine.inspect().paused == (state == "PAUSED")


def test_an_endless_pause_times_out_and_serves_on(lab: Lab, rig: Rig) -> None:
    begun(lab, rig)
    call = rig.request(100_000)
    answer = lab.ask("pause", {"mode": "wait"}, deadline_s=0.2)
    assert (answer.code, answer.error_code) == (Code.TIMEOUT, 504)
    assert lifecycle(lab) is Lifecycle.RUNNING
    assert rig.ask()["finish_reason"] == "length"
    assert lab.ask("pause").code is Code.OK
    call.result()


def test_an_error_behind_a_200_fails_the_command(lab: Lab, rig: Rig) -> None:
    begun(lab, rig)
    rig.server.faults.answer["/pause"] = (200, b'{"status": "error", "message": "no core"}')
    answer = lab.ask("pause")
    assert answer.code is Code.FAILED
    assert "no core" in answer.message
    assert lifecycle(lab) is Lifecycle.RUNNING


def test_a_wrong_token_is_unauthorized(lab: Lab, rig: Rig) -> None:
    begun(lab, rig)
    rig.server.faults.answer["/pause"] = (401, b"{}")
    answer = lab.ask("pause")
    assert (answer.code, answer.error_code) == (Code.UNAUTHORIZED, 403)


def test_a_server_of_another_make_or_without_dev_mode_is_waited_for(lab: Lab, rig: Rig) -> None:
    rig.server.faults.answer["/is_sleeping"] = (404, b"{}")
    lab.host(rig.engine)
    assert "VLLM_SERVER_DEV_MODE=1" in lab.health.ready()["workers"]
    with pytest.raises(IndexError):
        lab.member()
    rig.server.faults.answer.clear()
    lab.turn()
    assert lab.health.ready() == {}
    assert lifecycle(lab) is Lifecycle.RUNNING


def test_something_else_at_the_address_is_waited_for_too(lab: Lab, rig: Rig) -> None:
    rig.server.faults.answer.update({"/is_paused": (200, b"<html>"), "/is_sleeping": (500, b"oops")})
    lab.host(rig.engine)
    assert "oops" in lab.health.ready()["workers"]
    del rig.server.faults.answer["/is_sleeping"]
    lab.turn()
    assert "is this a vLLM server?" in lab.health.ready()["workers"]
    rig.server.faults.answer.clear()
    lab.turn()
    assert lab.health.ready() == {}


def test_a_server_that_is_not_up_yet_is_waited_for(lab: Lab, rig: Rig) -> None:
    rig.server.kill()
    lab.host(rig.engine)
    assert "takes no connection" in lab.health.ready()["workers"]
    request = lab.send("pause")
    lab.turn()
    assert lab.answers(request) == []
    rig.server.boot()
    lab.turn()
    assert lab.health.ready() == {}
    assert lab.answer(request).code is Code.OK, "it answers from its hello on"


def test_a_server_that_restarts_is_closed_before_anything_else(lab: Lab, rig: Rig) -> None:
    """miles#1724: a replacement serves old weights. Here the weights came by a transfer: nothing can load them."""
    begun(lab, rig)
    lab.ask("pause")
    transfer(lab, "v7")
    assert lab.ask("resume").code is Code.OK
    rig.server.kill()
    beat(lab)
    assert "takes no connection" in lab.health.ready()["workers"]
    assert lab.member().ready is False  # type: ignore[union-attr]
    rig.server.boot()
    waiting = rig.request(100_000)
    rig.server.faults.calls.clear()
    lab.turn()
    effects = [call for call in rig.server.faults.calls if call.startswith("POST") and "completions" not in call]
    assert effects[0].startswith("POST /pause?mode=abort"), effects
    assert waiting.result()["finish_reason"] == "abort"
    assert lifecycle(lab) is Lifecycle.BEHIND
    assert rig.engine.inspect().paused
    refused = lab.ask("resume")
    assert (refused.code, "v7" in refused.message) == (Code.BEHIND, True)
    assert lab.health.ready() != {}
    assert update(lab, rig, "v8").code is Code.OK
    assert lab.ask("resume").code is Code.OK
    assert rig.ask()["weights"] == "v8"
    assert lab.health.ready() == {}


@pytest.mark.parametrize("noticed", [True, False])
def test_a_server_that_restarts_gets_its_weights_again(lab: Lab, rig: Rig, noticed: bool) -> None:
    """Also where it was back before a heartbeat missed it."""
    begun(lab, rig)
    lab.ask("pause")
    update(lab, rig, "v2")
    lab.ask("resume")
    rig.server.kill()
    if noticed:
        beat(lab)
    rig.server.boot()
    beat(lab)
    assert rig.ask()["weights"] == "v2"
    assert lifecycle(lab) is Lifecycle.RUNNING
    assert rig.engine.inspect().version == "v2"


def test_a_network_that_was_away_changes_nothing(lab: Lab, rig: Rig) -> None:
    begun(lab, rig)
    lab.ask("pause")
    transfer(lab, "v7")
    lab.ask("resume")
    rig.server.unplug()
    beat(lab)
    assert lab.ask("reset_cache").code is Code.FAILED
    assert lab.health.ready() != {}
    pauses = rig.server.faults.count("/pause")
    rig.server.plug()
    beat(lab)
    assert lab.health.ready() == {}
    assert rig.server.faults.count("/pause") == pauses, "the same life: nobody was disturbed"
    assert rig.ask()["weights"] == "v7"


def test_a_server_that_dies_in_a_transfer_is_behind(lab: Lab, rig: Rig) -> None:
    begun(lab, rig)
    lab.ask("pause")
    for step in ("init", "start"):
        lab.ask("transfer_weights", {"step": step, "version": "v7"})
    rig.server.restart()
    beat(lab)
    assert lifecycle(lab) is Lifecycle.BEHIND
    assert rig.engine.inspect().paused
    lab.ask("transfer_weights", {"step": "start", "version": "v7"})
    for step in ("update", "finish"):
        answer = lab.ask("transfer_weights", {"step": step, "version": "v7", "info": {"weights": "w7"}})
        assert answer.code is Code.OK
    assert lab.ask("resume").code is Code.OK
    assert rig.ask()["weights"] == "w7"


@pytest.mark.parametrize("level", ["offload", "discard"])
def test_a_killed_worker_finds_its_server_as_it_left_it(lab: Lab, rig: Rig, level: str) -> None:
    first = lab.host(rig.engine)
    lab.ask("sleep", {"level": level})
    lab.ask("wakeup", {"tags": "kv_cache"})
    lab.crash(first)
    rig.restarted()
    lab.host(rig.engine)
    lab.silence()
    lab.turn()
    wait_until(lambda: lifecycle(lab) is Lifecycle.PAUSED, 30.0, "taken over")
    assert rig.resident == (False, True)
    assert lab.ask("wakeup", {"resume": True}).code is Code.OK
    assert rig.ask()["weights"] == "w0"


def test_a_cut_load_taints_and_an_update_heals(lab: Lab, rig: Rig) -> None:
    begun(lab, rig)
    lab.ask("pause")
    rig.server.faults.cut["/collective_rpc"] = "before"
    answer = update(lab, rig, "v2")
    assert (answer.code, answer.error_code) == (Code.TAINTED, 503)
    assert lab.ask("resume").code is Code.TAINTED
    rig.server.faults.cut.clear()
    assert update(lab, rig, "v3").code is Code.OK
    assert lab.ask("resume").code is Code.OK


def test_a_refused_sleep_leaves_it_running(lab: Lab, rig: Rig) -> None:
    rig.server.bugs.no_sleep_mode = True
    begun(lab, rig)
    answer = lab.ask("sleep")
    assert answer.code is Code.UNSUPPORTED
    assert "--enable-sleep-mode" in answer.message
    assert lifecycle(lab) is Lifecycle.RUNNING
    assert rig.ask()["weights"] == "w0"


@pytest.mark.parametrize("point", ["after_state", "after_effect"])
@pytest.mark.parametrize("method", ["pause", "resume", "sleep", "wakeup", "reset_cache", "update_weights", "finish"])
def test_a_crash_at_any_point_of_an_operation(lab: Lab, rig: Rig, method: str, point: str) -> None:
    """kill -9 of the worker; the server lives on. The next process answers once, and the server is as was asked."""
    crash = CrashAt(point)
    first = lab.host(rig.engine, fault=crash)
    request = _prepared(lab, rig, method)
    crash.armed = True
    request = _sent(lab, method, request)
    with pytest.raises(Crash):
        lab.turn()
    lab.crash(first)
    rig.restarted()
    lab.host(rig.engine)
    lab.silence()
    lab.turn()
    tainted = method == "finish" and point == "after_state"
    assert {one.code for one in lab.answers(request)} <= {Code.TAINTED if tainted else Code.OK, Code.ALREADY}
    found = rig.engine.inspect()
    running = method in ("resume", "wakeup", "reset_cache")
    assert found.paused != running
    assert all(found.resident.values()) == (method != "sleep")
    if method != "sleep" and not tainted:
        assert found.version == {"update_weights": "v2", "finish": "v7"}.get(method, "default")
    if running:
        assert rig.ask()["weights"] == "w0"
    if tainted:
        transfer(lab, "v8")
        assert lab.ask("resume").code is Code.OK


def _sent(lab: Lab, method: str, request: str) -> str:
    """Appends what the worker dies of; the id that is answered."""
    if method == "update_weights":
        lab.send("decide", {"request_id": request, "decision": "commit"})
        return request
    if method == "finish":
        return lab.send("transfer_weights", {"step": "finish", "version": "v7"})
    args: dict[str, dict[str, Any]] = {"sleep": {"level": "discard"}, "wakeup": {"resume": True}}
    return lab.send(method, args.get(method))


def _prepared(lab: Lab, rig: Rig, method: str) -> str:
    if method in ("resume", "update_weights", "finish"):
        lab.ask("pause")
    if method == "wakeup":
        lab.ask("sleep")
    if method == "finish":
        for step in ("init", "start", "update"):
            lab.ask("transfer_weights", {"step": step, "version": "v7", "info": {"weights": "w7"}})
    if method != "update_weights":
        return ""
    request = lab.send("update_weights", {"version": "v2", "source": rig.checkpoint("w2")})
    lab.turn()
    return request


def test_a_wake_that_leaves_the_server_open_is_closed_by_the_worker(lab: Lab, rig: Rig) -> None:
    """The pause behind a wake fails too: nothing but the worker's next look can close it."""
    begun(lab, rig)
    lab.ask("sleep")
    rig.server.faults.answer["/pause"] = (500, b"{}")
    assert lab.ask("wakeup", {"tags": "weight"}).code is Code.FAILED
    assert not rig.engine.inspect().paused
    assert "should not" in lab.health.ready()["workers"]
    rig.server.faults.answer.clear()
    beat(lab)
    assert rig.engine.inspect().paused
    assert lab.health.ready() == {}
    assert lifecycle(lab) is Lifecycle.PAUSED
    assert lab.ask("wakeup", {"resume": True}).code is Code.OK
    assert rig.ask()["weights"] == "w0"


def test_a_server_that_somebody_else_opened_is_closed_again(lab: Lab, rig: Rig) -> None:
    begun(lab, rig)
    lab.ask("pause")
    rig.server.core.call(rig.server.core.resume).result(30.0)
    beat(lab)
    assert rig.engine.inspect().paused
    assert lab.ask("resume").code is Code.OK
    beat(lab)
    assert not rig.engine.inspect().paused
