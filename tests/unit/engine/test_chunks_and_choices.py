"""Prompts in chunks beside requests that decode, and several choices of one prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moebus.engine.paddle import PaddleEngine
from moebus.engine.port import EngineFailed, EngineTimeout, Prompt
from moebus.engine.prompts import choices
from moebus.schemas.errors import InvalidInput
from tests.support.background import Background
from tests.support.exact import check_exact
from tests.support.gate import Gate
from tests.support.generate import random_prompts
from tests.support.paddle import SMALL, needs_paddle
from tests.support.wait import wait_until

pytestmark = [needs_paddle, pytest.mark.paddle]
(LONG,) = random_prompts(1, (100, 101), SMALL.vocab_size, 8, max_tokens=4)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def engine(gate: Gate) -> Iterator[PaddleEngine]:
    made = PaddleEngine.create(replace(SMALL, prefill_chunk=30), seed=1, hook=gate)
    yield made
    gate.open()
    made.close()


class Recorder:
    """Stands before the runner's forward: (requests, tokens of each) of every call."""

    def __init__(self, engine: PaddleEngine) -> None:
        self.calls: list[tuple[list[str], int]] = []
        self._forward = engine._scheduler._runner.forward
        engine._scheduler._runner.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, batch: Any, count: int) -> npt.NDArray[np.float32]:
        self.calls.append(([one.prompt.request_id for one in batch], count))
        return self._forward(batch, count)


def test_a_long_prompt_does_not_hold_up_who_decodes(engine: PaddleEngine, gate: Gate) -> None:
    seen = Recorder(engine)
    short = Prompt("short", np.arange(5), max_tokens=20)
    gate.close_after("step", 2)
    first = Background(lambda: engine.generate(short, 60))
    gate.wait_held()
    second = Background(lambda: engine.generate(LONG, 60))
    wait_until(lambda: engine.inspect().in_flight == 2, what="both inside")
    gate.open()
    results = [first.result(), second.result()]
    chunks = [count for names, count in seen.calls if names == [LONG.request_id]]
    assert chunks[:4] == [30, 30, 30, 10]
    first_chunk = seen.calls.index(([LONG.request_id], 30))
    last_chunk = seen.calls.index(([LONG.request_id], 10))
    between = [names for names, _ in seen.calls[first_chunk:last_chunk]]
    assert between.count(["short"]) == 3, "one token a step goes on"
    check_exact(engine, [short, LONG], results)


def test_the_tokens_of_a_step_are_shared_by_all_prompts(engine: PaddleEngine) -> None:
    seen = Recorder(engine)
    prompts = random_prompts(4, (20, 21), SMALL.vocab_size, 9, max_tokens=1)
    results = engine.generate_many(prompts, 60)
    assert [count for _, count in seen.calls] == [20, 10, 10, 20, 20]
    check_exact(engine, prompts, results)


def test_a_chunked_prompt_may_be_aborted_in_the_middle(engine: PaddleEngine, gate: Gate) -> None:
    gate.close_after("step", 2)
    call = Background(lambda: engine.generate(LONG, 60))
    gate.wait_held()
    assert engine.abort_requests(None) == [LONG.request_id]
    gate.open()
    part = call.result()
    assert part.finish_reason == "abort"
    assert part.routes is not None
    # without a token: not prefilled, no rows (a step that had begun may have added one chunk)
    assert (len(part.token_ids), len(part.routes), part.versions) == (0, 0, ())
    assert engine.cache.pool.available == engine.cache.pool.total
    after = engine.generate(replace(LONG, request_id="again"), 60)
    assert after.cached_tokens >= 24, "what was computed is in the cache"
    check_exact(engine, [LONG], [after])


@pytest.mark.parametrize("chunk", [0, 30])
def test_choices_share_one_prefill(chunk: int) -> None:
    engine = PaddleEngine.create(replace(SMALL, prefill_chunk=chunk), seed=1)
    try:
        seen = Recorder(engine)
        asked = choices(replace(LONG, temperature=1.0, seed=40), 4)
        assert [(one.request_id, one.seed) for one in asked] == [(f"{LONG.request_id}#{n}", 40 + n) for n in range(4)]
        results = engine.generate_many(asked, 60)
        assert [result.cached_tokens for result in results] == [0, 96, 96, 96]
        prefilled = sum(count * len(names) for names, count in seen.calls if count > 1)
        assert prefilled == 100 + 3 * 4
        assert len({tuple(result.token_ids.tolist()) for result in results}) > 1
        check_exact(engine, asked, results)
        alone = engine.generate(replace(asked[2], request_id="alone"), 60)
        assert alone.token_ids.tolist() == results[2].token_ids.tolist()
    finally:
        engine.close()


def test_followers_go_on_without_their_leader(engine: PaddleEngine, gate: Gate) -> None:
    gate.close_after("step", 1)
    call = Background(lambda: engine.generate_many(choices(LONG, 3), 60))
    gate.wait_held()
    assert engine.abort_requests(["r0#0"]) == ["r0#0"]
    gate.open()
    results = call.result()
    assert [result.finish_reason for result in results] == ["abort", "length", "length"]
    check_exact(engine, choices(LONG, 3)[1:], results[1:])


def test_all_enter_or_none(engine: PaddleEngine) -> None:
    with pytest.raises(InvalidInput, match="in flight"):
        engine.generate_many([LONG, replace(LONG, request_id="other"), LONG], 60)
    with pytest.raises(InvalidInput, match="token_ids"):
        engine.generate_many([LONG, replace(LONG, request_id="other", token_ids=np.asarray([-1]))], 60)
    with pytest.raises(InvalidInput, match="n: 0 choices"):
        choices(LONG, 0)
    assert engine.inspect().in_flight == 0
    assert engine.generate(LONG, 60).finish_reason == "length"


def test_the_first_failure_is_raised_when_all_have_ended(engine: PaddleEngine) -> None:
    def broken(token: int, logprob: float) -> None:
        raise OSError("closed")

    one, two, three = choices(LONG, 3)
    with pytest.raises(EngineFailed, match="'r0#1' raised OSError"):
        engine.generate_many([one, replace(two, on_token=broken), three], 60)
    assert engine.inspect().in_flight == 0


def test_too_late_means_all_are_aborted(engine: PaddleEngine, gate: Gate) -> None:
    gate.close_after("step", 0)
    call = Background(lambda: engine.generate_many(choices(LONG, 3), 0.2))
    gate.wait_held()
    with pytest.raises(EngineTimeout):
        call.result()
    gate.open()
    wait_until(lambda: engine.inspect().in_flight == 0, what="all gone")
