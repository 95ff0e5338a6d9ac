"""The whole forward without any cache: what tests and checks compare the engine with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from moebus.engine.paddle.config import ModelConfig
from moebus.engine.paddle.model import CausalAttention, Decoder, Route, Tensor
from moebus.engine.paddle.routing import OwnRouting
from moebus.engine.paddle.runtime import load_paddle
from moebus.schemas.dtypes import RouteArray


def as_tensors(weights: Mapping[str, object]) -> dict[str, Tensor]:
    """Weights by name as tensors; arrays are copied, tensors (which may carry gradients) taken as they are."""
    to_tensor = load_paddle().to_tensor
    return {name: to_tensor(value) if isinstance(value, np.ndarray) else value for name, value in weights.items()}


def whole_logits(
    config: ModelConfig, weights: Mapping[str, object], token_ids: npt.NDArray[np.int64], route: Route
) -> Tensor:
    """Logits [n, vocab_size] of a whole sequence [n] at once; gradients flow where they are on."""
    decoder = Decoder(config, as_tensors(weights))
    positions = np.arange(len(token_ids), dtype=np.int64)
    return decoder.logits(decoder.hidden(token_ids, positions, CausalAttention(len(token_ids)), route))


def full_recompute(
    config: ModelConfig, weights: Mapping[str, object], token_ids: npt.NDArray[np.int64]
) -> tuple[RouteArray, npt.NDArray[np.float32]]:
    """Routes [n, moe_layers, top_k] and logits float32 [n, vocab_size] of `token_ids` int64 [n].

    A request's own rows are the first P + O - 1 of its tokens' rows.
    """
    seen: dict[int, Tensor] = {}
    with load_paddle().no_grad():
        logits = whole_logits(config, weights, token_ids, OwnRouting(config, seen.__setitem__))
    layers = [seen[layer].numpy() for layer in config.moe_layers]
    routes: RouteArray = np.stack(layers, axis=1).astype(config.card().dtype)
    return routes, np.array(logits.numpy())
