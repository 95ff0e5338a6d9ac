"""Too few blocks: the youngest request gives its own up and is computed again, and its rows stay those of the first
time. And the rows of every way a request can end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from moebus.engine.paddle import PaddleEngine
from moebus.engine.port import Generation
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.exact import check_exact
from tests.support.gate import Gate
from tests.support.generate import random_prompts
from tests.support.paddle import SMALL, needs_paddle, write_weights
from tests.support.wait import wait_until

pytestmark = [needs_paddle, pytest.mark.paddle]
TIGHT = replace(SMALL, num_blocks=12, max_batch=4)  # 96 positions
PAIR = random_prompts(2, (38, 39), SMALL.vocab_size, 4, max_tokens=40)  # 5 blocks each at first, 10 in the end


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def engine(gate: Gate, tmp_path: Path) -> Iterator[PaddleEngine]:
    made = PaddleEngine.create(TIGHT, seed=1, hook=gate, allowed_roots=(str(tmp_path),))
    yield made
    gate.open()
    made.close()


def free(engine: PaddleEngine) -> bool:
    return engine.cache.pool.available == engine.cache.pool.total


@cache
def alone(index: int, max_tokens: int = 40) -> Generation:
    """What an engine with blocks for all gives for PAIR[index]."""
    engine = PaddleEngine.create(SMALL, seed=1)
    try:
        return engine.generate(replace(PAIR[index], max_tokens=max_tokens), 60)
    finally:
        engine.close()


def test_a_preempted_request_ends_as_if_it_had_been_alone(engine: PaddleEngine) -> None:
    results = engine.generate_many(PAIR, 60)
    assert engine.preemptions > 0
    for result, expected in zip(results, (alone(0), alone(1)), strict=True):
        assert result.token_ids.tolist() == expected.token_ids.tolist()
        assert np.array_equal(result.routes, expected.routes)  # type: ignore[arg-type]
        assert np.abs(result.logprobs - expected.logprobs).max() < 2e-5
    assert results[0].cached_tokens == results[1].cached_tokens == 0, "its own blocks are no hits"
    check_exact(engine, PAIR, results)
    assert free(engine)


def test_the_oldest_always_gets_on(engine: PaddleEngine) -> None:
    prompts = random_prompts(8, (30, 60), SMALL.vocab_size, 5, max_tokens=30)
    results = engine.generate_many(prompts, 60)
    assert [len(result.token_ids) for result in results] == [30] * 8
    assert engine.preemptions > 0
    assert free(engine)


def preempted(engine: PaddleEngine, gate: Gate) -> tuple[Background[Generation], Background[Generation]]:
    """Two requests, the younger one of which has just been put out; the engine is held before a step."""
    calls = []
    for prompt in PAIR:
        gate.close_after("step", 3)
        calls.append(Background(lambda prompt=prompt: engine.generate(prompt, 60)))  # type: ignore[misc]
        gate.wait_held()
        if len(calls) == 1:
            gate.open()
            wait_until(lambda: engine.inspect().in_flight == 1, what="one inside")
    for _ in range(60):
        if engine.preemptions:
            return calls[0], calls[1]
        gate.step()
    raise AssertionError("nothing was preempted")


def test_aborted_while_it_waits_it_keeps_what_it_had(engine: PaddleEngine, gate: Gate) -> None:
    first, second = preempted(engine, gate)
    assert engine.abort_requests(["r1"]) == ["r1"]
    gate.open()
    part = second.result()
    assert part.finish_reason == "abort"
    sampled = len(part.token_ids)
    assert 0 < sampled < 40
    assert part.routes is not None
    assert len(part.routes) == 38 + sampled - 1
    expected = alone(1)
    assert expected.routes is not None
    assert np.array_equal(part.routes, expected.routes[: len(part.routes)])
    assert first.result().finish_reason == "length"
    assert free(engine)


def test_first_capture_wins_over_what_new_weights_make_of_it(engine: PaddleEngine, gate: Gate, tmp_path: Path) -> None:
    first, second = preempted(engine, gate)
    pause = Background(lambda: engine.pause("keep", Left()))
    wait_until(lambda: engine.inspect().paused, what="admission closed")
    gate.open()
    pause.result()
    write_weights(tmp_path / "w.safetensors", 9)
    engine.commit(engine.stage("v9", str(tmp_path / "w.safetensors"), None, Left()), "reset", Left())
    engine.resume()
    first.result()
    result = second.result()
    (_, old), (start, new) = result.versions
    assert (old, new) == ("initial", "v9")
    assert start > 38
    expected = alone(1)
    assert expected.routes is not None
    assert result.routes is not None
    assert len(result.routes) == 38 + 40 - 1
    assert np.array_equal(result.routes[:start], expected.routes[:start])
    assert result.token_ids[: start - 37].tolist() == expected.token_ids[: start - 37].tolist()


ROWS = [
    # what ends it, tokens, finish reason
    ("length", 10, "length"),
    ("one token", 1, "length"),
    ("no token", 0, "length"),
    ("eos", 4, "stop"),
    ("stop id", 4, "stop"),
    ("abort", 3, "abort"),
]


@pytest.mark.parametrize("pressed", [False, True], ids=["at ease", "preempted on the way"])
@pytest.mark.parametrize(("end", "tokens", "reason"), ROWS)
def test_rows_are_prompt_and_output_less_one(end: str, tokens: int, reason: str, pressed: bool) -> None:
    prompt = replace(PAIR[1], max_tokens=10)
    free_run = alone(1, 10)
    last = int(free_run.token_ids[3])
    assert last not in free_run.token_ids[:3]
    told: list[int] = []
    held: list[PaddleEngine] = []

    def on_token(token: int, _: float) -> None:
        told.append(token)
        if end == "abort" and len(told) == 3:
            held[0].abort_requests(["r1"])

    changed = {"one token": {"max_tokens": 1}, "no token": {"max_tokens": 0}, "stop id": {"stop_token_ids": (last,)}}
    asked = replace(prompt, on_token=on_token, **changed.get(end, {}))  # type: ignore[arg-type]
    blocks = 11 if pressed else 64  # the older one grows, this one does not
    config = replace(SMALL, num_blocks=blocks, eos_token_ids=(last,) if end == "eos" else ())
    engine = PaddleEngine.create(config, seed=1)
    held.append(engine)
    try:
        older = replace(PAIR[0], ignore_eos=True, max_tokens=16)
        result = engine.generate_many([older, asked], 60)[1]
        assert (len(result.token_ids), result.finish_reason) == (tokens, reason)
        assert told == result.token_ids.tolist() == free_run.token_ids[:tokens].tolist()
        assert result.routes is not None
        assert free_run.routes is not None
        rows = 38 + tokens - 1 if tokens else 38
        assert len(result.routes) == rows
        assert np.array_equal(result.routes, free_run.routes[:rows])
        assert result.versions == ((0, "initial"),)
        assert free(engine)
        if pressed and tokens > 3:
            assert engine.preemptions > 0
    finally:
        engine.close()


def test_eos_ends_and_may_be_ignored() -> None:
    prompt = replace(PAIR[1], max_tokens=10)
    free_run = alone(1, 10)
    eos = int(free_run.token_ids[3])
    engine = PaddleEngine.create(replace(SMALL, eos_token_ids=(eos, 5)), seed=1)
    try:
        ended = engine.generate(prompt, 30)
        assert (ended.finish_reason, ended.token_ids[-1]) == ("stop", eos)
        ignored = engine.generate(replace(prompt, ignore_eos=True), 30)
        assert ignored.token_ids.tolist() == free_run.token_ids.tolist()
        asked = engine.generate(replace(prompt, ignore_eos=True, stop_token_ids=(eos,)), 30)
        assert asked.token_ids.tolist() == ended.token_ids.tolist()
    finally:
        engine.close()
