"""Top-k routing: which experts, and with which weights."""

from __future__ import annotations

from collections.abc import Callable

from moebus.engine.paddle.config import ModelConfig
from moebus.engine.paddle.model import Tensor
from moebus.engine.paddle.runtime import load_paddle

RouterHook = Callable[[int, Tensor], None]
"""Called in every MoE layer with its global number and the ids, int64 [T, top_k]; must not change them."""


MAX_WHOLE = 64


def ordered_experts(logits: Tensor) -> Tensor:
    """Ids int64 [T, experts], the largest logit first; of equal ones the lower id (unlike topk)."""
    return load_paddle().argsort(logits, axis=-1, descending=True, stable=True)


def top_experts(logits: Tensor, top_k: int) -> Tensor:
    """Ids int64 [T, top_k] of the largest logits: the first of `ordered_experts`."""
    return ordered_experts(logits)[:, :top_k]


def gate_weights(logits: Tensor, ids: Tensor, *, norm_topk: bool = True) -> Tensor:
    """Gates float32 [T, top_k]: the softmax over all experts, with `norm_topk` renormalised over the chosen ones."""
    paddle = load_paddle()
    # int64 ids only: take_along_axis reads garbage with uint8 ones on the CPU
    scores = logits if norm_topk else paddle.nn.functional.softmax(logits, axis=-1)
    chosen = paddle.take_along_axis(scores, ids.astype("int64"), axis=-1)
    return paddle.nn.functional.softmax(chosen, axis=-1) if norm_topk else chosen


class OwnRouting:
    """The model's own top-k; `hook` sees the ids. `whole`: where there are few experts it sees all of them in order, of
    which the first `top_k` are the ids: unlike a part of it, that is one piece of memory, quicker to collect."""

    def __init__(self, config: ModelConfig, hook: RouterHook | None = None, *, whole: bool = False) -> None:
        self._top_k = config.top_k
        self._norm_topk = config.norm_topk
        self._hook = hook
        self.whole = whole and config.num_experts <= MAX_WHOLE

    def __call__(self, layer: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        order = ordered_experts(logits)
        ids = order[:, : self._top_k]
        if self._hook is not None:
            self._hook(layer, order if self.whole else ids)
        return ids, gate_weights(logits, ids, norm_topk=self._norm_topk)
