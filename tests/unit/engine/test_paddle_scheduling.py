"""Batching, waiting, and steps that fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moebus.engine.paddle import PaddleEngine
from moebus.engine.paddle.capture import RouteMissing
from moebus.engine.port import Deadline, EngineFailed, PauseMode, Prompt
from moebus.schemas.errors import InvalidInput
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.gate import Gate
from tests.support.generate import generate_all, random_prompts
from tests.support.paddle import SMALL, needs_paddle
from tests.support.wait import wait_until

pytestmark = [needs_paddle, pytest.mark.paddle]


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def engine(gate: Gate) -> Iterator[PaddleEngine]:
    made = PaddleEngine.create(replace(SMALL, num_blocks=16, max_batch=4), seed=1, hook=gate)
    yield made
    gate.open()
    made.close()


def free(engine: PaddleEngine) -> bool:
    """No block is held by anybody."""
    return engine.cache.pool.available == engine.cache.pool.total


def test_more_requests_than_blocks_and_batch_all_finish(engine: PaddleEngine) -> None:
    prompts = random_prompts(20, (20, 60), SMALL.vocab_size, 1, max_tokens=10)
    results = generate_all(engine, prompts)
    assert all(len(result.token_ids) == 10 for result in results)
    assert free(engine)


def test_a_request_waits_for_blocks(engine: PaddleEngine, gate: Gate) -> None:
    big = Prompt("big", np.arange(100) % 128, max_tokens=20)  # 15 of 16 blocks
    gate.close_after("step", 2)
    first = Background(lambda: engine.generate(big, 30))
    gate.wait_held()
    second = Background(lambda: engine.generate(replace(big, request_id="second", token_ids=big.token_ids + 1), 30))
    wait_until(lambda: engine.inspect().in_flight == 2, what="both requests inside")
    gate.open()
    assert len(first.result().token_ids) == len(second.result().token_ids) == 20
    assert free(engine)


def test_a_waiting_request_can_be_aborted(engine: PaddleEngine, gate: Gate) -> None:
    big = Prompt("big", np.arange(100) % 128, max_tokens=20)
    gate.close_after("step", 2)
    first = Background(lambda: engine.generate(big, 30))
    gate.wait_held()
    second = Background(lambda: engine.generate(replace(big, request_id="second"), 30))
    wait_until(lambda: engine.inspect().in_flight == 2, what="both requests inside")
    assert engine.abort_requests(["second"]) == ["second"]
    gate.open()
    aborted = second.result()
    assert aborted.finish_reason == "abort"
    assert aborted.routes is not None
    assert aborted.routes.shape == (0, 2, 2)
    assert aborted.versions == ()
    assert aborted.version_ranges == ()
    assert first.result().finish_reason == "length"


def test_a_request_that_never_fits_is_refused(engine: PaddleEngine) -> None:
    with pytest.raises(InvalidInput, match="exceed 128 positions"):  # of the KV cache
        engine.generate(Prompt("r", np.zeros(119, np.int64), max_tokens=10), 30)
    assert engine.generate(Prompt("r", np.zeros(118, np.int64), max_tokens=10), 30).finish_reason == "length"


def test_aborts_at_random_leak_nothing(engine: PaddleEngine) -> None:
    draw = np.random.default_rng(0)
    prompts = random_prompts(24, (5, 50), SMALL.vocab_size, 2, max_tokens=20)
    calls = [Background(lambda prompt=prompt: engine.generate(prompt, 30)) for prompt in prompts]  # type: ignore[misc]
    for index in draw.permutation(24)[:12]:
        engine.abort_requests([f"r{index}"])
    results = [call.result() for call in calls]
    assert {result.finish_reason for result in results} <= {"abort", "length"}
    for prompt, result in zip(prompts, results, strict=True):
        rows = len(prompt.token_ids) + len(result.token_ids) - 1 if len(result.token_ids) else 0
        assert result.routes is not None
        assert len(result.routes) == rows
    assert free(engine)


class Failing:
    """Stands before the runner's forward; fails the calls for which `when` says so."""

    def __init__(self, engine: PaddleEngine, when: Any) -> None:
        self._forward = engine._scheduler._runner.forward
        self._when = when
        engine._scheduler._runner.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, batch: Any, count: int) -> npt.NDArray[np.float32]:
        if self._when(batch):
            raise RuntimeError("C++ trace\n\nOut of memory")
        return self._forward(batch, count)


def test_a_failed_prefill_ends_that_request_only(engine: PaddleEngine) -> None:
    Failing(engine, lambda batch: any(s.prompt.request_id == "r1" for s in batch))
    prompts = random_prompts(4, (20, 30), SMALL.vocab_size, 3, max_tokens=6)
    calls = [Background(lambda prompt=prompt: engine.generate(prompt, 30)) for prompt in prompts]  # type: ignore[misc]
    for index, call in enumerate(calls):
        if index == 1:
            with pytest.raises(EngineFailed, match=r"\(Out of memory\)"):
                call.result()
        else:
            assert call.result().finish_reason == "length"
    assert free(engine)


def test_a_failed_decode_ends_its_batch_and_the_engine_lives(engine: PaddleEngine) -> None:
    failures = iter([False, False, True])
    expected = engine.generate(Prompt("r", np.arange(30), max_tokens=6), 30)
    engine.reset_cache()
    Failing(engine, lambda batch: next(failures, False))
    with pytest.raises(EngineFailed, match="Out of memory"):
        engine.generate(Prompt("r", np.arange(30), max_tokens=6), 30)
    assert free(engine)
    again = engine.generate(Prompt("r", np.arange(30), max_tokens=6), 30)  # hits blocks of the failed request
    assert again.cached_tokens > 0
    assert again.token_ids.tolist() == expected.token_ids.tolist()
    assert np.array_equal(again.routes, expected.routes)  # type: ignore[arg-type]
    assert engine.pause("abort", Left()).idle_confirmed


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_idle_is_confirmed_once_the_device_has_finished_what_was_queued(
    engine: PaddleEngine, gate: Gate, mode: PauseMode
) -> None:
    """The device is asked after the last step, and the pause does not end before it answers."""
    finish, asked = threading.Event(), []

    def synchronize() -> None:
        asked.append((engine.inspect().in_flight, sum(point == "step" for point, _ in gate.calls)))
        assert finish.wait(60)

    gate.close_after("step", 2)
    call = Background(lambda: engine.generate(Prompt("r", np.arange(20), max_tokens=4), 30))
    gate.wait_held()
    engine.device.synchronize = synchronize  # type: ignore[method-assign]
    pause = Background(lambda: engine.pause(mode, Left()))
    wait_until(lambda: engine.inspect().paused, what="admission closed")
    gate.open()
    wait_until(lambda: asked, what="the device is asked")
    steps = sum(point == "step" for point, _ in gate.calls)
    assert not pause.done
    finish.set()
    assert pause.result().idle_confirmed
    assert asked == [(1 if mode == "keep" else 0, steps)]
    engine.resume()
    assert call.result().finish_reason == ("abort" if mode == "abort" else "length")


def test_a_hook_that_fails_ends_requests_and_the_engine_lives() -> None:
    faults = [ValueError("planned")]

    def hook(point: str, subject: str, deadline: Deadline | None) -> None:
        if point == "step" and faults:
            raise faults.pop()

    engine = PaddleEngine.create(SMALL, seed=1, hook=hook)
    try:
        with pytest.raises(EngineFailed, match="planned"):
            engine.generate(Prompt("r", np.arange(5)), 30)
        assert engine.generate(Prompt("r", np.arange(5)), 30).finish_reason == "length"
    finally:
        engine.close()


def test_weights_that_give_no_numbers_are_an_error(engine: PaddleEngine) -> None:
    head = engine._weights.parameters["head.weight"]
    good = np.array(head.numpy())
    head.set_value(np.full_like(good, np.nan))
    with pytest.raises(EngineFailed, match="not finite"):
        engine.generate(Prompt("r", np.arange(5)), 30)
    head.set_value(good)
    assert free(engine)
    assert engine.generate(Prompt("r", np.arange(5)), 30).finish_reason == "length"


def test_a_missing_row_is_an_error_and_never_sent(engine: PaddleEngine) -> None:
    engine.generate(Prompt("r", np.arange(30), max_tokens=4), 30)
    engine._capture._generation[:] = 0  # as if the host buffer had been lost
    with pytest.raises(RouteMissing, match="24 of 33 rows were not captured, the first is row 0"):
        engine.generate(Prompt("r", np.arange(30), max_tokens=4), 30)
    assert free(engine)
    engine.reset_cache()
    assert engine.generate(Prompt("r", np.arange(30), max_tokens=4), 30).routes is not None
