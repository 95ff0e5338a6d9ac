"""Gathered routes equal a full recompute without cache, bit for bit: what the whole project rests on.

Float32 only: a recompute adds up in another order, and only a rounding at a router's tie could tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from moebus.engine.paddle import TINY, ModelConfig, PaddleEngine
from tests.support.exact import check_exact
from tests.support.exact_cases import CASES
from tests.support.generate import generate_all, random_prompts, whole
from tests.support.paddle import needs_paddle

pytestmark = [needs_paddle, pytest.mark.paddle]


@pytest.fixture(scope="module")
def engine() -> Iterator[PaddleEngine]:
    made = PaddleEngine.create(TINY, seed=11)
    yield made
    made.close()


@pytest.mark.parametrize("case", CASES)
def test_every_way_is_exact(case: str) -> None:
    report = CASES[case](0)
    assert report.compared > 1500
    assert report.seen > 0, "the case was not about what it is named after"


@pytest.mark.parametrize(
    "config",
    [
        ModelConfig(
            vocab_size=64, hidden_size=32, num_layers=2, first_dense_layers=0, num_heads=2, num_kv_heads=1,
            num_experts=300, top_k=8, shared_experts=2, moe_intermediate_size=8, block_size=4, num_blocks=64,
        ),
        ModelConfig(
            vocab_size=64, hidden_size=32, num_layers=4, first_dense_layers=2, num_heads=4, num_kv_heads=4,
            num_experts=4, top_k=1, intermediate_size=16, moe_intermediate_size=8, block_size=1, num_blocks=300,
        ),
    ],
    ids=["300 experts, shared ones", "top 1, blocks of 1"],
)  # fmt: skip
def test_other_shapes(config: ModelConfig) -> None:
    engine = PaddleEngine.create(config, seed=13)
    try:
        prompts = random_prompts(4, (5, 30), config.vocab_size, 7, max_tokens=8)
        for _ in range(2):
            results = generate_all(engine, prompts)
            check_exact(engine, prompts, results)
        assert all(result.cached_tokens > 0 for result in results)
        assert results[0].routes is not None
        assert results[0].routes.dtype == config.card().dtype
    finally:
        engine.close()


def test_position_coded_self_check() -> None:
    engine = PaddleEngine.create(replace(TINY, num_blocks=64), seed=14, self_check=True)
    try:
        prompts = random_prompts(10, (3, 40), TINY.vocab_size, 8, max_tokens=12, temperature=1.0)
        for _ in range(3):
            results = generate_all(engine, prompts)
            for prompt, result in zip(prompts, results, strict=True):
                assert result.routes is not None
                assert len(result.routes) == len(prompt.token_ids) + 11
                assert (result.routes == np.arange(len(result.routes))[:, None, None]).all()
            prompts = [replace(p, token_ids=whole(p, r)) for p, r in zip(prompts, results, strict=True)]
        assert sum(result.cached_tokens for result in results) > 100
    finally:
        engine.close()


def test_neighbours_do_not_change_a_request(engine: PaddleEngine) -> None:
    prompts = random_prompts(9, (5, 50), TINY.vocab_size, 9, max_tokens=16, temperature=1.0)
    engine.reset_cache()
    alone = [engine.generate(prompt, 30) for prompt in prompts]
    engine.reset_cache()
    together = generate_all(engine, prompts)
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert np.array_equal(one.routes, other.routes)  # type: ignore[arg-type]
        assert np.abs(one.logprobs - other.logprobs).max() < 2e-5
