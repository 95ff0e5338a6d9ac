"""Comparison of what an engine gathered with a full recompute without any cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moebus.engine.paddle import PaddleEngine, full_recompute
from moebus.engine.port import Generation, Prompt
from tests.support.generate import whole


def check_exact(engine: PaddleEngine, prompts: Sequence[Prompt], results: Sequence[Generation]) -> int:
    """Routes equal bit for bit, log probabilities within 2e-5; returns the token-layers compared."""
    weights, compared = engine.weights(), 0
    for prompt, result in zip(prompts, results, strict=True):
        tokens = whole(prompt, result)
        routes, logits = full_recompute(engine.config, weights, tokens)
        assert result.routes is not None
        assert len(result.routes) == len(tokens) - 1
        assert np.array_equal(result.routes, routes[:-1])
        shifted = logits - logits.max(axis=-1, keepdims=True)
        logprobs = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
        first = len(prompt.token_ids) - 1
        expected = logprobs[np.arange(first, len(tokens) - 1), result.token_ids]
        assert np.abs(expected - result.logprobs).max() < 2e-5
        compared += result.routes.shape[0] * result.routes.shape[1]
    return compared
