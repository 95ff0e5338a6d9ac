"""Capture off for a round, or for a request: no routes, nothing else is different, and no row is made up later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from moebus.engine.paddle import PaddleEngine
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.exact import check_exact
from tests.support.gate import Gate
from tests.support.generate import random_prompts
from tests.support.paddle import SMALL, needs_paddle
from tests.support.wait import wait_until

pytestmark = [needs_paddle, pytest.mark.paddle]
PROMPTS = random_prompts(3, (30, 50), SMALL.vocab_size, 4, max_tokens=10)
PROMPT = PROMPTS[0]


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def engine(gate: Gate) -> Iterator[PaddleEngine]:
    made = PaddleEngine.create(replace(SMALL, num_blocks=24, cpu_blocks=64), seed=1, hook=gate)
    yield made
    gate.open()
    made.close()


def settled(engine: PaddleEngine) -> None:
    wait_until(lambda: engine.inspect().participants[0].in_flight == 0, what="swaps at rest")


def test_a_round_without_and_the_next_one_with_routes(engine: PaddleEngine) -> None:
    before = engine.generate_many(PROMPTS, 60)
    for _ in range(2):
        engine.suspend_capture()
    for _ in range(2):  # the second time on the first one's blocks, in both tiers
        quiet = engine.generate_many(PROMPTS, 60)
        settled(engine)
        for one, other in zip(quiet, before, strict=True):
            assert one.routes is None
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.versions == other.versions
    assert sum(one.cached_tokens for one in quiet) > 0
    engine.resume_capture()
    after = engine.generate_many(PROMPTS, 60)
    assert [one.cached_tokens for one in after] == [0, 0, 0], "blocks of that time have no rows"
    check_exact(engine, PROMPTS, after)
    engine.resume_capture()
    assert engine.generate(PROMPT, 60).cached_tokens > 0, "a second time it drops nothing"


@pytest.mark.parametrize("first_off", [True, False])
def test_a_request_over_the_edge_has_none(engine: PaddleEngine, gate: Gate, first_off: bool) -> None:
    expected = engine.generate(PROMPT, 60)
    engine.reset_cache()
    if first_off:
        engine.suspend_capture()
    gate.close_after("step", 4)
    call = Background(lambda: engine.generate(PROMPT, 60))
    gate.wait_held()
    (engine.resume_capture if first_off else engine.suspend_capture)()
    gate.open()
    result = call.result()
    assert result.routes is None
    assert result.token_ids.tolist() == expected.token_ids.tolist()
    assert result.versions == ((0, "initial"),)
    engine.resume_capture()
    again = engine.generate(replace(PROMPT, request_id="again"), 60)
    assert np.array_equal(again.routes, expected.routes)  # type: ignore[arg-type]


def test_a_request_that_opts_out_leaves_its_rows_to_others(engine: PaddleEngine) -> None:
    quiet = replace(PROMPT, capture_routes=False)
    results = engine.generate_many([quiet, PROMPTS[1]], 60)
    assert results[0].routes is None
    check_exact(engine, [PROMPTS[1]], results[1:])
    after = engine.generate(PROMPT, 60)
    assert after.cached_tokens > 0
    check_exact(engine, [PROMPT], [after])


def test_suspension_outlives_sleep_and_update(engine: PaddleEngine) -> None:
    engine.suspend_capture()
    engine.pause("abort", Left())
    engine.commit(engine.stage("v2", None, None, Left()), "reset", Left())
    engine.resume()
    result = engine.generate(PROMPT, 60)
    assert (result.routes, result.versions) == (None, ((0, "v2"),))
    engine.resume_capture()
    assert engine.generate(PROMPT, 60).routes is not None


@pytest.mark.parametrize("off_at", ["before", "after"])
def test_preempted_with_capture_off_on_one_side(off_at: str) -> None:
    """What is computed again is not what sampled: rows of the first time count, if they were recorded."""
    gate = Gate()
    pair = random_prompts(2, (38, 39), SMALL.vocab_size, 4, max_tokens=40)
    engine = PaddleEngine.create(replace(SMALL, num_blocks=12, max_batch=4), seed=1, hook=gate)
    try:
        if off_at == "before":
            engine.suspend_capture()
        gate.close_after("step", 2)
        call = Background(lambda: engine.generate_many(pair, 60))
        gate.wait_held()
        for _ in range(60):
            if engine.preemptions:
                break
            gate.step()
        assert engine.preemptions > 0
        (engine.resume_capture if off_at == "before" else engine.suspend_capture)()
        gate.open()
        assert [one.routes for one in call.result()] == [None, None], "each has rows of a time without capture"
    finally:
        gate.open()
        engine.close()
