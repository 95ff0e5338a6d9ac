"""The engine's CPU cache tier takes part in pause, resume, sleep and update answers as an executor of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from moebus.engine.paddle import PaddleEngine
from moebus.schemas.responses import Code, ControlResponse
from tests.support.background import Background
from tests.support.control_lab import Lab
from tests.support.gate import Gate
from tests.support.generate import random_prompts
from tests.support.paddle import SMALL, needs_paddle
from tests.support.wait import wait_until

pytestmark = [needs_paddle, pytest.mark.paddle]
CONFIG = replace(SMALL, num_blocks=16, max_batch=2, cpu_blocks=32)
PROMPTS = random_prompts(3, (50, 51), CONFIG.vocab_size, 5, max_tokens=4)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def engine(lab: Lab, gate: Gate) -> Iterator[PaddleEngine]:
    made = PaddleEngine.create(CONFIG, seed=3, hook=gate)
    lab.host(made)
    yield made
    gate.open()
    made.close()


def participant(answer: ControlResponse) -> dict[str, Any]:
    assert answer.result is not None
    found = answer.result["participants"]
    assert isinstance(found, list)
    (only,) = found
    assert isinstance(only, dict)
    return only


def test_it_is_named_in_every_answer(lab: Lab, engine: PaddleEngine) -> None:
    for prompt in PROMPTS:
        engine.generate(prompt, 30)
    wait_until(lambda: engine.inspect().participants[0].in_flight == 0, what="swaps at rest")
    paused = participant(lab.ask("pause"))
    assert (paused["name"], paused["state"], paused["in_flight"], paused["cut"]) == (
        "cache_transfer", "paused", 0, [],
    )  # fmt: skip
    assert paused["finished"] > 0
    update = lab.send("update_weights", {"version": "v2"})
    lab.turn()
    lab.decide(update)
    assert lab.answer(update).code is Code.OK
    assert participant(lab.answer(update)) == paused
    assert len(engine.cache.host) == 0, "both tiers forget the old version"
    assert participant(lab.ask("resume"))["state"] == "running"
    assert participant(lab.ask("sleep"))["state"] == "paused"
    assert participant(lab.ask("wakeup", {"resume": True}))["state"] == "running"


def test_swaps_that_do_not_finish_in_time_are_cut_and_named(lab: Lab, engine: PaddleEngine, gate: Gate) -> None:
    gate.close_after("swap_out", 0)
    for prompt in PROMPTS:
        engine.generate(prompt, 30)
    gate.wait_held()
    moving = engine.inspect().participants[0].in_flight
    assert moving > 0
    request = lab.send("pause", deadline_s=5)
    turn_while_time_passes(lab)
    answer = lab.answer(request)
    seen = participant(answer)
    assert answer.code is Code.OK, "the requests are drained; a cache entry less is no fault"
    assert (seen["in_flight"], len(seen["cut"])) == (0, moving)
    assert len(engine.cache.host) == 0
    gate.open()
    assert lab.ask("resume").code is Code.OK
    assert engine.generate(PROMPTS[0], 30).routes is not None


def turn_while_time_passes(lab: Lab) -> None:
    call = Background(lab.turn)

    def over() -> bool:
        lab.clock.advance(1)
        return call.done

    wait_until(over, what="the pause")
    call.result()
