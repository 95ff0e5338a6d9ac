"""Replay by parts: layers of a pipeline stage, rows of a context-parallel rank, and whether it was used at all."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moebus.engine.paddle import ReplayUnused, RouterReplay, load_paddle
from moebus.engine.paddle.reference import as_tensors, whole_logits
from moebus.engine.paddle.weights import random_weights
from moebus.schemas.errors import InvalidInput
from tests.support.paddle import SMALL, needs_paddle

pytestmark = [needs_paddle, pytest.mark.paddle]
CARD = SMALL.card()  # MoE layers 1 and 2
TOKENS = np.random.default_rng(1).integers(0, SMALL.vocab_size, 24)
ROUTES = np.argsort(np.random.default_rng(2).random((24, 2, 8)), axis=-1)[..., :2].astype(np.uint8)
VALID = np.arange(24) % 5 != 0


@pytest.fixture(scope="module")
def weights() -> dict[str, npt.NDArray[np.float32]]:
    return random_weights(SMALL, 3)


def logits(weights: Any, route: Any) -> npt.NDArray[np.float32]:
    return np.array(whole_logits(SMALL, weights, TOKENS, route).numpy())


def test_stages_together_are_the_whole(weights: Any) -> None:
    whole = RouterReplay(CARD, ROUTES, VALID)
    stages = {layer: whole.part(layers=[layer]) for layer in CARD.moe_layers}
    expected = logits(weights, whole)
    assert np.array_equal(logits(weights, lambda layer, x: stages[layer](layer, x)), expected)
    assert not np.array_equal(logits(weights, RouterReplay(CARD, ROUTES[:, ::-1], VALID)), expected)
    with pytest.raises(InvalidInput, match="layer: 2 is not one of the MoE layers"):
        stages[1](2, load_paddle().zeros([24, 8]))
    assert [stage.check_used() for stage in stages.values()] == [19, 19]


@pytest.mark.parametrize(
    "ranks",
    [
        [slice(0, 12), slice(12, 24)],
        [np.r_[0:6, 18:24], np.r_[6:18]],  # zigzag: the ends to one rank, the middle to the other
        [slice(0, None, 2), slice(1, None, 2)],
    ],
    ids=["contiguous", "zigzag", "striped"],
)
def test_ranks_together_are_the_whole(weights: Any, ranks: list[Any]) -> None:
    paddle, whole = load_paddle(), RouterReplay(CARD, ROUTES, VALID)
    parts = [whole.part(rows=rows) for rows in ranks]
    order = np.argsort(np.concatenate([np.arange(24)[rows] for rows in ranks]))

    def route(layer: int, x: Any) -> Any:
        found = [
            part(layer, paddle.gather(x, paddle.to_tensor(np.arange(24)[rows])))
            for part, rows in zip(parts, ranks, strict=True)
        ]
        back = paddle.to_tensor(order)
        return tuple(paddle.gather(paddle.concat(list(one)), back) for one in zip(*found, strict=True))

    expected = logits(weights, RouterReplay(CARD, ROUTES, VALID))
    assert np.abs(logits(weights, route) - expected).max() < 1e-5
    assert sum(part.check_used() for part in parts) == 19
    assert whole.forwards == {1: 0, 2: 0}


def test_both_at_once_and_gradients_reach_the_router(weights: Any) -> None:
    paddle = load_paddle()
    part = RouterReplay(CARD, ROUTES, VALID).part(layers=[2], rows=slice(4, 9))
    x = paddle.to_tensor(np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32))
    x.stop_gradient = False
    ids, gates = part(2, x)
    expected = RouterReplay(CARD, ROUTES, VALID)(2, paddle.concat([x] * 5)[:24])[0].numpy()
    valid = VALID[4:9]
    assert np.array_equal(ids.numpy()[valid], ROUTES[4:9, 1][valid])
    assert expected.shape == (24, 2)
    gates[:, 0].sum().backward()
    assert float(x.grad.abs().sum()) > 0
    assert as_tensors(weights).keys() == weights.keys()


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"layers": [0]}, "layers: 0 is not one of"),
        ({"layers": [1, 3]}, "layers: 3 is not one of"),
        ({"layers": []}, "moe_layers: 0 layers"),
        ({"layers": [2, 1]}, "ascend"),
        ({"rows": np.asarray([24])}, r"rows: a row is outside 0\.\.23"),
        ({"rows": np.asarray([-1])}, r"rows: a row is outside 0\.\.23"),
        ({"rows": np.asarray([0.5])}, "rows: a slice or an array"),
        ({"rows": np.asarray([[1]])}, "rows: a slice or an array"),
    ],
)
def test_parts_that_are_not_there(part: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        RouterReplay(CARD, ROUTES).part(**part)


def test_replay_that_nobody_asks_for_is_said(weights: Any) -> None:
    replay = RouterReplay(CARD, ROUTES, VALID)
    with pytest.raises(ReplayUnused, match=r"layers \[1, 2\] did not ask"):
        replay.check_used()
    own = RouterReplay(CARD, ROUTES, np.zeros(24, np.bool_))
    logits(weights, lambda layer, x: replay(layer, x) if layer == 1 else own(layer, x))  # one layer forgot its hook
    with pytest.raises(ReplayUnused, match=r"layers \[2\] did not ask"):
        replay.check_used()
    logits(weights, replay)
    assert replay.check_used() == replay.rows_used == 19
    assert replay.forwards == {1: 2, 2: 1}


def test_logits_of_another_model_are_refused() -> None:
    with pytest.raises(InvalidInput, match="9 router logits for 8 experts"):
        RouterReplay(CARD, ROUTES)(1, load_paddle().zeros([24, 9]))
