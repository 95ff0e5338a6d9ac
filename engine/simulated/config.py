"""What a simulated engine looks like from outside."""

from __future__ import annotations

from dataclasses import dataclass

from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard


@dataclass(frozen=True, slots=True)
class SimulatedConfig:
    """Sizes. `moe_layers`: global layer numbers. `*_bytes`: what each tag is said to hold on the device.

    Raises:
        InvalidInput: naming the field.
    """

    seed: int = 0
    vocab_size: int = 512
    num_experts: int = 16
    top_k: int = 4
    moe_layers: tuple[int, ...] = (1, 2)
    weight_bytes: int = 1 << 20
    kv_cache_bytes: int = 1 << 21
    block_size: int = 16
    cached_blocks: int = 1024
    max_position: int = 1 << 17

    def __post_init__(self) -> None:
        self.card()  # checks experts, top-k and layers
        for name in ("vocab_size", "weight_bytes", "kv_cache_bytes", "block_size", "max_position"):
            if getattr(self, name) < 1:
                raise InvalidInput(name, f"{getattr(self, name)} is below 1")

    def card(self) -> ModelCard:
        """The routing shape of this engine."""
        return ModelCard(self.num_experts, self.top_k, self.moe_layers, name="simulated")
