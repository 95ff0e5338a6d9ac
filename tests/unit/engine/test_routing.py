"""Top-k and gates on Paddle, beside a plain numpy reference."""

from __future__ import annotations

import numpy as np
import pytest

from moebus.engine.paddle.routing import gate_weights, top_experts
from moebus.engine.paddle.runtime import load_paddle
from tests.support.paddle import needs_paddle

pytestmark = [needs_paddle, pytest.mark.paddle]


def test_the_lower_id_wins_a_tie() -> None:
    logits = load_paddle().to_tensor(np.asarray([[1, 2, 2, 2, 0], [0, 0, 0, 0, 0], [3, 1, 2, 3, 3]], dtype=np.float32))
    assert top_experts(logits, 2).numpy().tolist() == [[1, 2], [0, 1], [0, 3]]


def test_many_ties() -> None:
    logits = np.random.default_rng(0).integers(0, 4, (200, 64)).astype(np.float32)
    expected = np.argsort(-logits, axis=-1, kind="stable")[:, :8]
    assert np.array_equal(top_experts(load_paddle().to_tensor(logits), 8).numpy(), expected)


def test_gates_are_the_renormalised_softmax_of_the_chosen() -> None:
    logits = np.random.default_rng(0).standard_normal((50, 16)).astype(np.float32)
    ids = top_experts(load_paddle().to_tensor(logits), 4)
    softmax = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    chosen = np.take_along_axis(softmax, ids.numpy(), axis=-1)
    expected = chosen / chosen.sum(axis=-1, keepdims=True)
    gates = gate_weights(load_paddle().to_tensor(logits), ids).numpy()
    assert np.abs(gates - expected).max() < 1e-6


def test_narrow_ids_give_the_same_gates() -> None:
    paddle = load_paddle()
    logits = paddle.to_tensor(np.random.default_rng(0).standard_normal((50, 16)).astype(np.float32))
    ids = top_experts(logits, 4)
    assert np.array_equal(gate_weights(logits, ids.astype("uint8")).numpy(), gate_weights(logits, ids).numpy())
