"""Replay on the trainer's side: what it gains, what it refuses, and that it trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moebus.engine.paddle import TINY, PaddleEngine, RouterReplay, load_paddle, replay_logprobs
from moebus.engine.paddle.reference import as_tensors, whole_logits
from moebus.engine.paddle.replay import round_bf16
from moebus.engine.paddle.routing import OwnRouting
from moebus.schemas.errors import InvalidInput
from tests.support.generate import generate_all, random_prompts, whole
from tests.support.paddle import needs_paddle

pytestmark = [needs_paddle, pytest.mark.paddle]
CARD = TINY.card()


@dataclass
class Rollout:
    tokens: npt.NDArray[np.int64]
    prompt: int
    routes: npt.NDArray[Any]
    logprobs: npt.NDArray[np.float32]


@dataclass
class Round:
    weights: dict[str, npt.NDArray[np.float32]]
    rollouts: list[Rollout]

    def difference(self, *, replay: bool, shift: int = 0, **kwargs: Any) -> float:
        """Mean |delta log p| over the output tokens."""
        parts = []
        for rollout in self.rollouts:
            routes = np.roll(rollout.routes, shift, axis=0) if replay else None
            logprobs = replay_logprobs(TINY, self.weights, rollout.tokens, routes, **kwargs)
            parts.append(np.abs(logprobs[rollout.prompt - 1 :] - rollout.logprobs))
        return float(np.concatenate(parts).mean())


@pytest.fixture(scope="module")
def rollouts() -> Iterator[Round]:
    engine = PaddleEngine.create(TINY, seed=21)
    try:
        prompts = random_prompts(8, (10, 30), TINY.vocab_size, 1, max_tokens=40, temperature=1.0)
        made = []
        for prompt, result in zip(prompts, generate_all(engine, prompts), strict=True):
            assert result.routes is not None
            made.append(Rollout(whole(prompt, result), len(prompt.token_ids), result.routes, result.logprobs))
        yield Round(dict(engine.weights()), made)
    finally:
        engine.close()


def test_the_same_weights_give_the_rollouts_log_probabilities(rollouts: Round) -> None:
    assert rollouts.difference(replay=True) < 1e-5
    assert rollouts.difference(replay=False) < 1e-5


def test_routes_shifted_by_one_token_show(rollouts: Round) -> None:
    assert rollouts.difference(replay=True, shift=1) > 0.01


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_replay_is_nearer_than_own_routing_when_the_router_is_off(rollouts: Round, noise: float) -> None:
    own = rollouts.difference(replay=False, router_noise=noise, seed=3)
    given = rollouts.difference(replay=True, router_noise=noise, seed=3)
    assert 0 < given < own / 4


def test_replay_is_nearer_under_bf16_rounding(rollouts: Round) -> None:
    own = rollouts.difference(replay=False, router_bf16=True)
    assert 0 < rollouts.difference(replay=True, router_bf16=True) < own / 4


def test_noise_follows_its_seed(rollouts: Round) -> None:
    def run(seed: int) -> npt.NDArray[np.float32]:
        return replay_logprobs(TINY, rollouts.weights, rollouts.rollouts[0].tokens, None, router_noise=0.05, seed=seed)

    assert np.array_equal(run(1), run(1))
    assert not np.array_equal(run(1), run(2))


def test_a_row_for_the_last_token_is_taken_and_not_needed(rollouts: Round) -> None:
    one = rollouts.rollouts[0]
    padded = np.concatenate([one.routes, one.routes[:1]])
    assert np.array_equal(
        replay_logprobs(TINY, rollouts.weights, one.tokens, padded),
        replay_logprobs(TINY, rollouts.weights, one.tokens, one.routes),
    )


def test_masked_rows_use_the_own_top_k(rollouts: Round) -> None:
    one = rollouts.rollouts[0]
    spoilt = one.routes.copy()
    spoilt[5:9] = 255  # never looked at
    valid = np.ones(len(spoilt), dtype=np.bool_)
    valid[5:9] = False
    masked = replay_logprobs(TINY, rollouts.weights, one.tokens, spoilt, valid=valid)
    own = replay_logprobs(TINY, rollouts.weights, one.tokens, None)
    assert np.abs(masked - own).max() < 1e-5
    assert RouterReplay(CARD, spoilt, valid).rows_used == len(spoilt) - 4
    nothing = replay_logprobs(TINY, rollouts.weights, one.tokens, spoilt, valid=np.zeros(len(spoilt), dtype=np.bool_))
    assert np.array_equal(nothing, own)


def _good(rows: int = 6) -> npt.NDArray[np.int64]:
    return np.broadcast_to(np.arange(4), (rows, 2, 4)).copy()


def _with(value: int) -> npt.NDArray[np.int64]:
    routes = _good()
    routes[3, 1, 2] = value
    return routes


@pytest.mark.parametrize(
    ("routes", "text"),
    [
        (_with(16), r"outside 0\.\.15"),
        (_with(-1), r"outside 0\.\.15"),
        (_with(3), "twice"),
        (_good()[:, :1], "shape"),
        (_good()[..., :3], "shape"),
        (_good().reshape(6, -1), "shape"),
        (_good().astype(np.float32), "integers"),
        (_good(5), "5 rows for 7 tokens"),
        (_good(8), "8 rows for 7 tokens"),
    ],
)
def test_bad_routes_are_refused(rollouts: Round, routes: npt.NDArray[Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        replay_logprobs(TINY, rollouts.weights, np.arange(7), routes)


def test_bad_masks_layers_and_lengths_are_refused() -> None:
    with pytest.raises(InvalidInput, match="valid"):
        RouterReplay(CARD, _good(), np.ones(5, dtype=np.bool_))
    with pytest.raises(InvalidInput, match="valid"):
        RouterReplay(CARD, _good(), np.ones(6))  # type: ignore[arg-type]
    replay = RouterReplay(CARD, _good())
    logits = load_paddle().zeros([6, 16])
    with pytest.raises(InvalidInput, match="layer"):
        replay(0, logits)
    with pytest.raises(InvalidInput, match="6 rows for a forward of 5"):
        replay(1, logits[:5])
    with pytest.raises(InvalidInput, match="two or more"):
        replay_logprobs(TINY, {}, np.arange(1), None)


@pytest.mark.parametrize("masked", [False, True])
def test_gradients_reach_the_router_and_equal_those_of_own_routing(rollouts: Round, masked: bool) -> None:
    paddle = load_paddle()
    one = rollouts.rollouts[0]
    valid = np.ones(len(one.routes), dtype=np.bool_)
    valid[::3] = not masked

    def gradient(route: Any) -> dict[str, npt.NDArray[np.float32]]:
        weights = as_tensors(rollouts.weights)
        for tensor in weights.values():
            tensor.stop_gradient = False
        logits = whole_logits(TINY, weights, one.tokens[:-1], route)
        paddle.nn.functional.cross_entropy(logits, paddle.to_tensor(one.tokens[1:])).backward()
        return {name: tensor.grad.numpy() for name, tensor in weights.items()}

    own = gradient(OwnRouting(TINY))
    given = gradient(RouterReplay(CARD, one.routes, valid))
    assert own.keys() == given.keys() == rollouts.weights.keys()
    for layer in TINY.moe_layers:
        assert np.abs(given[f"layers.{layer}.moe.router.weight"]).max() > 1e-5
    for name, expected in own.items():
        assert np.allclose(given[name], expected, atol=1e-6), name


def test_bf16_rounding_is_to_the_nearest_even() -> None:
    paddle = load_paddle()
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    values[:4] = [0.0, -0.0, 1.00390625, 1.01171875]  # the last two are ties
    expected = paddle.to_tensor(values).astype("bfloat16").astype("float32").numpy()
    assert np.array_equal(round_bf16(values), expected)
