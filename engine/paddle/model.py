"""The decoder's arithmetic. How tokens attend and how they are routed is passed in, so that generation on a paged
cache, a recompute without cache, and a trainer's replay share every other line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from moebus.engine.paddle.config import ModelConfig
from moebus.engine.paddle.runtime import load_paddle

Tensor = Any
"""A paddle.Tensor (Paddle is imported lazily, so its types are not known here)."""


class Attend(Protocol):
    """Attention of one layer: q [T, heads, head_dim], k and v [T, kv_heads, head_dim] -> [T, heads * head_dim]."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


class Route(Protocol):
    """Experts of one layer: router logits [T, experts] -> ids int64 [T, top_k] and gates float32 [T, top_k]."""

    def __call__(self, layer: int, logits: Tensor) -> tuple[Tensor, Tensor]: ...


class Decoder:
    """`weights`: parameters by name, shapes as `weights.weight_shapes` says. Holds no state of its own."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self._weights = weights
        self._paddle = load_paddle()
        self._functional = self._paddle.nn.functional

    def hidden(
        self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], attend: Attend, route: Route
    ) -> Tensor:
        """Hidden states [T, hidden_size] after the last norm, of `tokens` [T] at `positions` [T]."""
        paddle, config = self._paddle, self.config
        rope = self._rope(positions)
        x = self._functional.embedding(paddle.to_tensor(tokens), self._weights["embed.weight"])
        for layer in range(config.num_layers):
            x = self._layer(layer, f"layers.{layer}.", x, rope, attend, route)
        return self._norm(x, "norm")

    def drafts(
        self,
        hidden: Tensor,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        attend: Attend,
        route: Route,
    ) -> list[Tensor]:
        """Hidden states like `hidden` [T, hidden_size] of each draft layer: draft 0 proposes the token after the next
        one, draft 1 the one after that. Their layers count on from the model's own."""
        paddle, config = self._paddle, self.config
        rope = self._rope(positions)
        embedded = self._functional.embedding(paddle.to_tensor(tokens), self._weights["embed.weight"])
        found = []
        for draft in range(config.draft_layers):
            prefix = f"draft.{draft}."
            both = [self._norm(hidden, prefix + "hidden_norm"), self._norm(embedded, prefix + "embed_norm")]
            x = paddle.matmul(paddle.concat(both, axis=-1), self._weights[prefix + "join.weight"])
            x = self._layer(config.num_layers + draft, prefix, x, rope, attend, route)
            hidden = self._norm(x, prefix + "norm")
            found.append(hidden)
        return found

    def _layer(
        self, layer: int, prefix: str, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend, route: Route
    ) -> Tensor:
        x = x + self._attention(layer, prefix, self._norm(x, prefix + "attention_norm"), rope, attend)
        y = self._norm(x, prefix + "mlp_norm")
        if layer < self.config.first_dense_layers:
            return x + self._mlp(y, prefix + "mlp")
        return x + self._moe(layer, prefix + "moe", y, route)

    def logits(self, hidden: Tensor) -> Tensor:
        """Token logits [T, vocab_size]."""
        return self._paddle.matmul(hidden, self._weights["head.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        square = (x * x).mean(axis=-1, keepdim=True)
        return x * self._paddle.rsqrt(square + self.config.norm_eps) * self._weights[name + ".weight"]

    def _attention(self, layer: int, prefix: str, x: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        config, prefix = self.config, prefix + "attention."
        q = self._projected(x, prefix + "q", config.num_heads)
        k = self._projected(x, prefix + "k", config.num_kv_heads)
        v = self._projected(x, prefix + "v", config.num_kv_heads)
        if config.qk_norm:
            q, k = self._norm(q, prefix + "q_norm"), self._norm(k, prefix + "k_norm")
        mixed = attend(layer, self._rotate(q, rope), self._rotate(k, rope), v)
        return self._paddle.matmul(mixed, self._weights[prefix + "o.weight"])

    def _projected(self, x: Tensor, name: str, heads: int) -> Tensor:
        out = self._paddle.matmul(x, self._weights[name + ".weight"])
        if self.config.attention_bias:
            out = out + self._weights[name + ".bias"]
        return out.reshape([x.shape[0], heads, -1])

    def _rope(self, positions: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        half = self.config.head_dim // 2
        frequencies = self.config.rope_theta ** (-np.arange(half) / half)
        angles = (positions[:, None] * frequencies)[:, None, :]
        to_tensor = self._paddle.to_tensor
        return to_tensor(np.cos(angles).astype(np.float32)), to_tensor(np.sin(angles).astype(np.float32))

    def _rotate(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = rope
        first, second = self._paddle.chunk(x, 2, axis=-1)
        return self._paddle.concat([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        """A gated MLP; with expert weights [E, ...] and x [1, T, hidden] it is all experts at once, [E, T, hidden]."""
        weights, matmul = self._weights, self._paddle.matmul
        gate = self._functional.silu(matmul(x, weights[name + ".gate.weight"]))
        return matmul(gate * matmul(x, weights[name + ".up.weight"]), weights[name + ".down.weight"])

    def _moe(self, layer: int, name: str, x: Tensor, route: Route) -> Tensor:
        # Every expert runs on every token and the gate is zero where it was not chosen: fewest operations, no copy
        # to the host in the middle of a step, and gradients everywhere. Made for small models.
        ids, gates = route(layer, self._paddle.matmul(x, self._weights[name + ".router.weight"]))
        chosen = self._functional.one_hot(ids, self.config.num_experts) * gates.unsqueeze(-1)
        by_expert = chosen.sum(axis=1).transpose([1, 0]).unsqueeze(-1)  # [E, T, 1]
        out = (self._mlp(x.unsqueeze(0), name + ".experts") * by_expert).sum(axis=0)
        if not self.config.shared_experts:
            return out
        shared = self._mlp(x, name + ".shared")
        if self.config.shared_gate:
            shared = shared * self._functional.sigmoid(
                self._paddle.matmul(x, self._weights[name + ".shared_gate.weight"])
            )
        return out + shared


def grouped_attention(paddle: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """q [B, Q, heads, D], k and v [B, S, kv_heads, D] -> [B * Q, heads * D]; mask [B, 1, 1, Q, S] is added."""
    batch, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    q = q.reshape([batch, queries, kv_heads, group, dim]).transpose([0, 2, 3, 1, 4])
    q = q.reshape([batch, kv_heads, group * queries, dim])
    scores = paddle.matmul(q, k.transpose([0, 2, 3, 1])) * dim**-0.5
    scores = scores.reshape([batch, kv_heads, group, queries, keys]) + mask
    weights = paddle.nn.functional.softmax(scores, axis=-1).reshape([batch, kv_heads, group * queries, keys])
    mixed = paddle.matmul(weights, v.transpose([0, 2, 1, 3]))
    mixed = mixed.reshape([batch, kv_heads, group, queries, dim]).transpose([0, 3, 1, 2, 4])
    return mixed.reshape([batch * queries, heads * dim])


class CausalAttention:
    """Plain attention over one whole sequence, without a cache."""

    def __init__(self, length: int) -> None:
        self._paddle = load_paddle()
        mask = np.triu(np.full((length, length), MASKED, dtype=np.float32), k=1)
        self._mask = self._paddle.to_tensor(mask[None, None, None])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return grouped_attention(self._paddle, q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), self._mask)


MASKED = -1e30
"""Added to the score of a key that must not be seen; its weight underflows to exactly 0."""
