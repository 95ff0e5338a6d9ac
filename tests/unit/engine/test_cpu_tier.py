"""The Paddle engine with a CPU tier: swapped blocks are exact, and their executor takes part in a pause."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from moebus.engine.paddle import PaddleEngine
from moebus.engine.port import Prompt
from moebus.schemas.tags import ALL_TAGS, Tag
from tests.support.background import Background
from tests.support.deadlines import Left, Polls
from tests.support.exact import check_exact
from tests.support.gate import Gate
from tests.support.generate import generate_all, random_prompts
from tests.support.paddle import SMALL, needs_paddle
from tests.support.wait import wait_until

pytestmark = [needs_paddle, pytest.mark.paddle]
CONFIG = replace(SMALL, num_blocks=16, max_batch=2, cpu_blocks=64)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def engine(gate: Gate) -> Iterator[PaddleEngine]:
    made = PaddleEngine.create(CONFIG, seed=3, hook=gate)
    yield made
    gate.open()
    made.close()


def settled(engine: PaddleEngine) -> None:
    wait_until(lambda: engine.inspect().participants[0].in_flight == 0, what="swaps at rest")


def fill(engine: PaddleEngine, rounds: int = 1) -> list[Prompt]:
    """Three prompts of which only two fit on the device, run one after the other."""
    prompts = random_prompts(3, (50, 51), CONFIG.vocab_size, 5, max_tokens=6)
    for _ in range(rounds):
        for prompt in prompts:
            engine.generate(prompt, 30)
            settled(engine)
    return prompts


def test_swapped_blocks_are_exact(engine: PaddleEngine) -> None:
    prompts = random_prompts(6, (40, 60), CONFIG.vocab_size, 6, max_tokens=8, temperature=1.0)
    compared = 0
    for _ in range(4):
        for pair in (prompts[:2], prompts[2:4], prompts[4:]):
            results = generate_all(engine, pair)
            settled(engine)
            compared += check_exact(engine, pair, results)
    assert engine.cache.swapped_in > 60
    assert sum(result.cached_tokens for result in results) >= 80
    assert compared > 2000


def test_the_rows_of_a_swapped_block_keep_the_version_they_were_computed_under(engine: PaddleEngine) -> None:
    first = fill(engine)[0]
    old = engine.generate(first, 30)
    fill(engine)
    engine.pause("abort", Left())
    engine.commit(engine.stage("v2", None, None, Left()), "keep", Left())
    engine.resume()
    before = engine.cache.swapped_in
    result = engine.generate(first, 30)
    assert engine.cache.swapped_in > before
    assert result.versions == ((0, "initial"), (48, "v2"))
    assert np.array_equal(result.routes, old.routes)  # type: ignore[arg-type]  # the weights are the same


def test_a_pause_waits_for_swaps_and_names_them(engine: PaddleEngine) -> None:
    fill(engine)
    (seen,) = engine.pause("abort", Left()).participants
    assert (seen.name, seen.state, seen.in_flight, seen.cut) == ("cache_transfer", "paused", 0, ())
    assert seen.finished > 0
    assert engine.inspect().participants == (seen,)
    engine.resume()
    assert engine.inspect().participants[0].state == "running"


def test_a_pause_cuts_swaps_at_its_deadline(engine: PaddleEngine, gate: Gate) -> None:
    prompts = random_prompts(3, (50, 51), CONFIG.vocab_size, 5, max_tokens=6)
    gate.close_after("swap_out", 0)
    for prompt in prompts:
        engine.generate(prompt, 30)
    gate.wait_held()
    (seen,) = engine.pause("abort", Polls(3)).participants
    assert seen.in_flight == 0
    assert len(seen.cut) >= 3
    gate.open()
    engine.resume()
    results = [engine.generate(prompt, 30) for prompt in prompts]
    check_exact(engine, prompts, results)


def test_inspect_is_quick_while_blocks_come_in(engine: PaddleEngine, gate: Gate) -> None:
    first = fill(engine)[0]
    gate.close_after("swap_in", 0)
    call = Background(lambda: engine.generate(first, 60))
    gate.wait_held()
    begun = time.monotonic()
    assert engine.inspect().in_flight == 1
    assert time.monotonic() - begun < 1
    gate.open()
    assert call.result().cached_tokens == 48


@pytest.mark.parametrize("tags", [(Tag.KV_CACHE,), ALL_TAGS])
def test_sleep_gives_all_memory_back_twenty_times(engine: PaddleEngine, tags: tuple[Tag, ...]) -> None:
    prompts = fill(engine, 2)
    assert len(engine.cache.host) > 0
    engine.pause("abort", Left())
    counter = engine.device.memory_allocated
    awake = counter()
    for _ in range(20):
        for tag in tags:
            engine.sleep(tag, "offload", Left())
        assert counter() < awake
        assert len(engine.cache.host) == 0, "both tiers forget"
        for tag in tags:
            engine.wakeup(tag, "restore", Left())
        assert counter() == awake
    engine.resume()
    results = [engine.generate(prompt, 30) for prompt in prompts]
    assert results[0].cached_tokens == 0
    check_exact(engine, prompts, results)


@pytest.mark.parametrize(("cache", "left"), [("reset", 0), ("keep", None)])
def test_an_update_treats_both_tiers_alike(engine: PaddleEngine, cache: str, left: int | None) -> None:
    fill(engine, 2)
    engine.pause("abort", Left())
    held = len(engine.cache.host)
    assert held > 0
    engine.commit(engine.stage("v2", None, None, Left()), cache, Left())  # type: ignore[arg-type]
    assert len(engine.cache.host) == (held if left is None else left)
    assert engine.reset_cache() >= held if left is None else True
    assert len(engine.cache.host) == 0
