"""Pause, resume, abort over vLLM's calls, and their faults."""

from __future__ import annotations

import time

import pytest

from moebus.engine.port import (
    EngineFailed,
    EngineTimeout,
    EngineUnauthorized,
    EngineUnknown,
    EngineUnreachable,
    PauseMode,
    Unsupported,
)
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.vllm import New
from tests.support.wait import wait_until

MODES: tuple[PauseMode, ...] = ("abort", "wait", "keep")


@pytest.mark.parametrize("mode", MODES)
def test_pause_closes_and_resume_opens(new: New, mode: PauseMode) -> None:
    rig = new()
    for _ in range(2):
        result = rig.engine.pause(mode, Left())
        assert (result.aborted, result.finished, result.frozen, result.idle_confirmed) == (0, 0, 0, False)
        assert rig.engine.inspect().paused
    held = rig.request(2)
    assert not held.done
    for _ in range(2):
        rig.engine.resume()
    assert held.result()["finish_reason"] == "length"
    assert not rig.engine.inspect().paused
    assert f"POST /pause?mode={mode}&clear_cache=false" in rig.server.faults.calls


@pytest.mark.parametrize(("mode", "reason"), [("abort", "abort"), ("wait", "length"), ("keep", "length")])
def test_what_becomes_of_requests(new: New, mode: PauseMode, reason: str) -> None:
    rig = new()
    call = rig.request(40 if mode == "wait" else 100_000 if mode == "abort" else 60)
    wait_until(lambda: rig.server.core.shown[0], 30.0, "the gauges count it")
    result = rig.engine.pause(mode, Left())
    assert {"abort": result.aborted, "wait": result.finished, "keep": result.frozen}[mode] == 1
    found = rig.engine.inspect()
    assert (found.in_flight, found.frozen) == ((1, 1) if mode == "keep" else (0, 0))
    assert call.done or mode == "keep" or wait_until(lambda: call.done, 30.0, "it ended")
    rig.engine.resume()
    assert call.result()["finish_reason"] == reason


def test_a_pause_that_waits_for_ever_times_out_and_opens_again(new: New) -> None:
    rig = new()
    call = rig.request(100_000)
    with pytest.raises(EngineTimeout, match="admission is open again"):
        rig.engine.pause("wait", Left(0.1))
    assert not rig.engine.inspect().paused
    assert rig.ask()["finish_reason"] == "length"
    assert not call.done
    assert rig.engine.pause("abort", Left()).aborted == 1
    assert call.result()["finish_reason"] == "abort"


@pytest.mark.parametrize("mode", MODES)
def test_a_pause_that_never_returns(new: New, mode: PauseMode) -> None:
    rig = new(pause_never_returns=True)
    with pytest.raises(EngineTimeout, match="open again"):
        rig.engine.pause(mode, Left(0.1))
    assert not rig.engine.inspect().paused


def test_a_pause_in_vain_over_frozen_requests_freezes_them_again(new: New) -> None:
    rig = new()
    call = rig.request(100_000)
    wait_until(lambda: rig.server.core.shown[0], 30.0, "the gauges count it")
    rig.engine.pause("keep", Left())
    with pytest.raises(EngineTimeout):
        rig.engine.pause("wait", Left(0.1))
    assert rig.engine.inspect().paused
    assert rig.engine.inspect().frozen == 1
    rig.engine.pause("abort", Left())
    assert call.result()["finish_reason"] == "abort"


def test_a_pause_cut_after_its_effect_is_done(new: New) -> None:
    rig = new()
    rig.engine.identity()
    rig.server.faults.cut["/pause"] = "after"
    rig.engine.pause("abort", Left())
    assert rig.engine.inspect().paused


def test_a_pause_cut_before_its_effect_has_failed(new: New) -> None:
    rig = new()
    rig.server.faults.cut["/pause"] = "before"
    with pytest.raises(EngineFailed, match="was not"):
        rig.engine.pause("abort", Left())
    assert not rig.engine.inspect().paused


def test_a_cut_pause_that_waits_is_unknown_while_requests_run(new: New) -> None:
    rig = new()
    call = rig.request(100_000)
    wait_until(lambda: rig.server.core.shown[0], 30.0, "the gauges count it")
    rig.server.core.call(lambda: rig.server.core.pause("wait", False))
    rig.server.faults.cut["/pause"] = "before"
    with pytest.raises(EngineUnknown):
        rig.engine.pause("wait", Left())
    rig.server.faults.cut.clear()
    rig.engine.pause("abort", Left())
    call.result()


def test_a_restart_in_the_middle_of_a_call(new: New) -> None:
    rig = new()
    rig.engine.identity()
    rig.server.faults.hold.add("/pause")
    call = Background(lambda: rig.engine.pause("abort", Left()))
    wait_until(lambda: rig.server.faults.count("/pause"), 30.0, "the call came in")
    rig.server.restart()
    with pytest.raises((EngineFailed, EngineUnknown)):
        call.result()
    assert not rig.engine.inspect().paused, "the new life serves; its worker has to close it"


@pytest.mark.parametrize("path", ["/pause", "/resume"])
def test_an_error_behind_a_200_is_a_failure(new: New, path: str) -> None:
    rig = new()
    rig.engine.pause("abort", Left())
    rig.server.faults.answer[path] = (200, b'{"status": "error", "message": "no core"}')
    with pytest.raises(EngineFailed, match="no core"):
        rig.engine.pause("abort", Left()) if path == "/pause" else rig.engine.resume()


@pytest.mark.parametrize(("path", "before"), [("/pause", False), ("/resume", True)])
def test_a_200_without_the_effect_is_a_failure(new: New, path: str, before: bool) -> None:
    rig = new()
    if before:
        rig.engine.pause("abort", Left())
    rig.server.faults.answer[path] = (200, b'{"status": "done"}')
    with pytest.raises(EngineFailed, match="said that it is done"):
        rig.engine.resume() if before else rig.engine.pause("abort", Left())


def test_without_the_token(new: New) -> None:
    rig = new()
    rig.server.faults.token = "right"
    with pytest.raises(EngineUnauthorized, match="token"):
        rig.engine.pause("abort", Left())


def test_without_dev_mode(new: New) -> None:
    rig = new()
    rig.server.faults.answer.update(dict.fromkeys(("/pause", "/is_paused", "/weight_info"), (404, b"{}")))
    with pytest.raises(Unsupported, match="VLLM_SERVER_DEV_MODE=1"):
        rig.engine.inspect()
    with pytest.raises(Unsupported, match="VLLM_SERVER_DEV_MODE=1"):
        rig.engine.pause("abort", Left())


def test_a_server_that_is_gone(new: New) -> None:
    rig = new()
    identity = rig.engine.identity()
    rig.server.kill()
    with pytest.raises(EngineUnreachable):
        rig.engine.pause("abort", Left())
    with pytest.raises(EngineUnreachable):
        rig.engine.inspect()
    assert rig.engine.identity() == identity
    assert rig.server.url in (rig.engine.trouble or "")
    rig.server.boot()
    assert rig.engine.identity() != identity
    assert rig.engine.trouble is None


def test_looks_are_quick_while_a_call_holds_the_core(new: New) -> None:
    rig = new(wake_seconds=1.5)
    rig.asleep()
    rig.engine = rig.connect(look_s=0.5)
    before = rig.engine.inspect()
    wake = Background(lambda: rig.engine.wakeup(next(iter(before.resident)), "restore", Left()))
    wait_until(lambda: rig.server.faults.count("/wake_up"), 30.0, "the wake runs")
    begun = time.monotonic()
    found = rig.engine.inspect()
    taken = time.monotonic() - begun
    assert rig.engine.identity()
    assert rig.engine.trouble is None
    assert taken < 1.0
    assert found == before, "as it was before the call"
    wake.result()


def test_abort_by_id_and_of_all(new: New) -> None:
    rig = new()
    one, two = rig.request(100_000, "a"), rig.request(100_000, "b")
    assert rig.engine.abort_requests([]) == []
    assert rig.server.faults.count("/abort_requests") == 0, "an empty list means all to the server"
    assert rig.engine.abort_requests(["cmpl-a-0"]) == ["cmpl-a-0"]
    assert one.result()["finish_reason"] == "abort"
    assert not two.done
    assert rig.engine.abort_requests(None) == ["?"]
    assert two.result()["finish_reason"] == "abort"


def test_reset_of_the_cache_also_over_running_requests(new: New) -> None:
    rig = new()
    call = rig.request(100_000, "a")
    wait_until(lambda: rig.server.core.cache, 30.0, "something is cached")
    rig.engine.pause("keep", Left())
    rig.engine.reset_cache()
    assert not rig.server.core.cache
    rig.engine.pause("abort", Left())
    call.result()
