"""The shape of the model and of its KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard

_POSITIVE = (
    "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "num_experts", "top_k",
    "intermediate_size", "moe_intermediate_size", "max_position", "block_size", "num_blocks", "max_batch",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder with grouped-query attention; layers from `first_dense_layers` on are MoE. All weights float32.

    `intermediate_size` is that of dense layers, `moe_intermediate_size` that of one expert; `shared_experts` (0: none)
    are always on. `draft_layers` more, MoE ones behind the model's own, each propose a later token (multi-token
    prediction); their routes are recorded nowhere.

    Families differ: `head_size` (0: hidden_size / num_heads), `attention_bias` (of q, k and v), `qk_norm` (of each
    head), `norm_topk` (gates add up to 1), `shared_gate` (of the shared experts); `paddle.hf.model_config` sets them.
    The KV cache has `num_blocks` blocks of `block_size` tokens; `max_batch` sequences decode at once.
    `cpu_blocks` more keep, in host memory, what the device had to evict. `prefill_chunk`: tokens of prompts forwarded
    a step at most (0: no limit). `eos_token_ids` end a request that does not ignore them.

    Raises:
        InvalidInput: naming the field.
    """

    vocab_size: int = 512
    hidden_size: int = 64
    num_layers: int = 3
    first_dense_layers: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    num_experts: int = 16
    top_k: int = 4
    shared_experts: int = 0
    intermediate_size: int = 128
    moe_intermediate_size: int = 32
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    max_position: int = 2048
    block_size: int = 16
    num_blocks: int = 256
    max_batch: int = 16
    cpu_blocks: int = 0
    prefill_chunk: int = 0
    eos_token_ids: tuple[int, ...] = ()
    draft_layers: int = 0
    head_size: int = 0
    attention_bias: bool = False
    qk_norm: bool = False
    norm_topk: bool = True
    shared_gate: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise InvalidInput(name, f"{getattr(self, name)} is below 1")
        for name in ("shared_experts", "cpu_blocks", "prefill_chunk", "draft_layers", "head_size"):
            if getattr(self, name) < 0:
                raise InvalidInput(name, f"{getattr(self, name)} is negative")
        for token in self.eos_token_ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidInput("eos_token_ids", f"{token} is not in 0..{self.vocab_size - 1}")
        if not 0 <= self.first_dense_layers < self.num_layers:
            raise InvalidInput("first_dense_layers", f"{self.first_dense_layers} is not in 0..{self.num_layers - 1}")
        if (not self.head_size and self.hidden_size % self.num_heads) or self.head_dim % 2:
            raise InvalidInput(
                "hidden_size", f"{self.hidden_size} is not num_heads ({self.num_heads}) times an even size"
            )
        if self.num_heads % self.num_kv_heads:
            raise InvalidInput("num_kv_heads", f"{self.num_kv_heads} does not divide num_heads ({self.num_heads})")
        self.card()  # checks experts, top-k and layers

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Global numbers of the MoE layers."""
        return tuple(range(self.first_dense_layers, self.num_layers))

    @property
    def num_slots(self) -> int:
        """Token positions that the KV cache holds."""
        return self.num_blocks * self.block_size

    def card(self) -> ModelCard:
        """The routing shape of this model."""
        return ModelCard(self.num_experts, self.top_k, self.moe_layers, name="moebus-tiny-moe")


TINY = ModelConfig()
"""The model of the demo and of the tests: 0.3 M parameters, a few milliseconds a step on one core."""
