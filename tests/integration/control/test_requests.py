"""Commands while requests run in the engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moebus.engine.port import Generation, Prompt
from moebus.engine.simulated import SimulatedEngine
from moebus.schemas.responses import Code
from tests.support.background import Background
from tests.support.control_lab import Lab
from tests.support.gate import Gate
from tests.support.wait import wait_until


def running(engine: SimulatedEngine, gate: Gate) -> Background[Generation]:
    """A request that is held after its first step."""
    gate.close_after("step", 1)
    prompt = Prompt("g1", np.arange(5, dtype=np.int64), max_tokens=4)
    call = Background(lambda: engine.generate(prompt, 1e9))
    gate.wait_held()
    return call


def test_keep_freezes_and_resume_goes_on(lab: Lab) -> None:
    gate = Gate()
    engine = lab.engine(gate=gate)
    lab.host(engine)
    call = running(engine, gate)
    pausing = Background(lambda: lab.ask("pause", {"mode": "keep"}))
    wait_until(lambda: engine.inspect().paused, what="the pause")
    gate.open()
    paused = pausing.result()
    assert paused.result is not None
    assert paused.result["pause"] == {"aborted": 0, "finished": 0, "frozen": 1, "idle_confirmed": True}
    refused = lab.ask("sleep", {"tags": "kv_cache"})
    assert refused.code is Code.ILLEGAL_STATE
    assert all(engine.inspect().resident.values())
    assert lab.ask("resume").code is Code.OK
    assert call.result().finish_reason == "length"


def test_frozen_requests_can_be_aborted_and_then_the_cache_sleeps(lab: Lab) -> None:
    gate = Gate()
    engine = lab.engine(gate=gate)
    lab.host(engine)
    call = running(engine, gate)
    pausing = Background(lambda: lab.ask("pause", {"mode": "keep"}))
    wait_until(lambda: engine.inspect().paused, what="the pause")
    gate.open()
    pausing.result()
    aborted = lab.ask("abort_requests", {"ids": ["g1", "g2"]})
    assert aborted.result == {"aborted": ["g1"], "aborted_count": 1, "not_found": ["g2"]}
    assert call.result().finish_reason == "abort"
    assert lab.ask("sleep", {"tags": "kv_cache"}).code is Code.OK


def test_abort_returns_the_partial_output(lab: Lab) -> None:
    gate = Gate()
    engine = lab.engine(gate=gate)
    lab.host(engine)
    call = running(engine, gate)
    sleeping = Background(lambda: lab.ask("sleep"))
    wait_until(lambda: engine.inspect().paused, what="the pause")
    gate.open()
    slept = sleeping.result()
    assert slept.result is not None
    assert slept.result["pause"] == {"aborted": 1, "finished": 0, "frozen": 0, "idle_confirmed": True}
    assert call.result().finish_reason == "abort"
    assert len(call.result().token_ids) == 1


@pytest.mark.parametrize(
    ("mode", "tags", "pause"),
    [
        ("wait", "weight,kv_cache", {"aborted": 0, "finished": 1, "frozen": 0, "idle_confirmed": True}),
        ("keep", "weight", {"aborted": 0, "finished": 0, "frozen": 1, "idle_confirmed": True}),
    ],
)
def test_sleep_pauses_as_its_mode_says(lab: Lab, mode: str, tags: str, pause: dict[str, Any]) -> None:
    gate = Gate()
    engine = lab.engine(gate=gate)
    lab.host(engine)
    call = running(engine, gate)
    sleeping = Background(lambda: lab.ask("sleep", {"tags": tags, "mode": mode}))
    wait_until(lambda: engine.inspect().paused, what="the pause")
    gate.open()
    slept = sleeping.result()
    assert slept.result is not None
    assert (slept.code, slept.result["pause"]) == (Code.OK, pause)
    assert not (mode == "keep" and call.done)
    assert lab.ask("wakeup", {"tags": tags, "resume": True}).code is Code.OK
    assert call.result().finish_reason == "length"
    assert len(call.result().token_ids) == 4


def test_weights_that_cannot_be_restored_are_partial(lab: Lab) -> None:
    engine = lab.engine()
    lab.host(engine)
    lab.ask("pause")
    update = lab.send("update_weights", {"version": "v2", "source": lab.file("v2")})
    lab.turn()
    lab.decide(update)
    lab.ask("sleep", {"level": "discard"})
    assert lab.weights is not None
    (lab.weights / "v2").unlink()
    partial = lab.ask("wakeup", {"resume": True})
    assert partial.code is Code.PARTIAL
    assert "does not exist" in partial.message
    assert partial.message.endswith("not resumed: weight is asleep")
    assert engine.inspect().paused
    lab.file("v2")
    assert lab.ask("wakeup", {"resume": True}).code is Code.OK
    assert engine.inspect().version == "v2"
