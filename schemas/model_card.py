"""ModelCard: the shape of a model's routing, which producers and trainers must agree on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
import xxhash

from moebus.schemas.dtypes import wire_dtype
from moebus.schemas.errors import InvalidInput
from moebus.schemas.hf_config import MAX_DEPTH, hf_routing

IdSpace = Literal["logical"]
MAX_LAYERS = 4096
MAX_TOP_K = 1024
_FIELDS = frozenset(["num_experts", "top_k", "moe_layers", "id_space", "name", "num_hidden_layers"])


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Routed experts per layer, experts per token, and the global numbers of the MoE layers, ascending.

    `id_space`: `logical`, ids as the router sees them (never those of a physical placement). `name` is for people;
    `num_hidden_layers` (dense layers too, no draft layers; None where unknown) is for answers of engines that count all
    layers. Neither is part of the digest, and the depth not of equality either.
    """

    num_experts: int
    top_k: int
    moe_layers: tuple[int, ...]
    id_space: IdSpace = "logical"
    name: str | None = None
    num_hidden_layers: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        wire_dtype(self.num_experts)
        _integer("top_k", self.top_k, 1, min(self.num_experts, MAX_TOP_K))
        object.__setattr__(self, "moe_layers", tuple(self.moe_layers))  # a list is taken too
        check_layers(self.moe_layers)
        if self.id_space != "logical":
            raise InvalidInput("id_space", f"{self.id_space!r} is unknown; known is logical")
        if self.name is not None and not isinstance(self.name, str):
            raise InvalidInput("name", f"a string is needed, not {type(self.name).__name__}")
        if self.num_hidden_layers is not None:
            _integer("num_hidden_layers", self.num_hidden_layers, self.moe_layers[-1] + 1, MAX_DEPTH)

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The type of the ids on the wire."""
        return wire_dtype(self.num_experts)

    def shape(self, rows: int) -> tuple[int, int, int]:
        """[rows, moe_layers, top_k]."""
        return (rows, len(self.moe_layers), self.top_k)

    @property
    def digest(self) -> str:
        """XXH3-128 (32 hex digits) of everything but the name and the depth."""
        fields = {key: value for key, value in self.to_dict().items() if key not in ("name", "num_hidden_layers")}
        return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())

    def to_dict(self) -> dict[str, object]:
        fields: dict[str, object] = {
            "num_experts": self.num_experts, "top_k": self.top_k, "moe_layers": list(self.moe_layers),
            "id_space": self.id_space,
        }  # fmt: skip
        more = {"name": self.name, "num_hidden_layers": self.num_hidden_layers}
        return fields | {key: value for key, value in more.items() if value is not None}

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> ModelCard:
        """The inverse of `to_dict`.

        Raises:
            InvalidInput: naming the field that is unknown, missing or malformed.
        """
        for name in data:
            if name not in _FIELDS:
                raise InvalidInput(str(name), "unknown field of a ModelCard")
        for name in ("num_experts", "top_k", "moe_layers"):
            if name not in data:
                raise InvalidInput(name, "missing in the ModelCard")
        layers = data["moe_layers"]
        if not isinstance(layers, (list, tuple)):
            raise InvalidInput("moe_layers", f"a list is needed, not {type(layers).__name__}")
        return cls(**{**data, "moe_layers": tuple(layers)})  # type: ignore[arg-type]  # checked in __post_init__

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelCard:
        try:
            data = json.loads(text)
        except ValueError:
            raise InvalidInput("card", "not JSON") from None
        if not isinstance(data, dict):
            raise InvalidInput("card", f"an object is needed, not {type(data).__name__}")
        return cls.from_dict(data)

    @classmethod
    def from_hf_config(cls, config: Mapping[str, object], name: str | None = None) -> ModelCard:
        """The card of a `config.json` as Hugging Face models have it (Mixtral, Qwen, DeepSeek, Kimi, GLM, gpt-oss,
        ERNIE, Llama 4, Step, MiniMax, Hunyuan, Nemotron-H and alike; of a `text_config` where there is one).

        Raises:
            InvalidInput: naming what the file does not say.
        """
        found = hf_routing(config)
        return cls(found.num_experts, found.top_k, found.layers, name=name, num_hidden_layers=found.depth)


def check_layers(layers: Sequence[int]) -> None:
    """Raises InvalidInput (field `moe_layers`) unless these are 1 to 4096 ascending numbers from 0 to 65,535."""
    if not 1 <= len(layers) <= MAX_LAYERS:
        raise InvalidInput("moe_layers", f"{len(layers)} layers; 1 to {MAX_LAYERS} are allowed")
    for layer in layers:
        _integer("moe_layers", layer, 0, 65_535)
    if any(later <= earlier for earlier, later in pairwise(layers)):
        raise InvalidInput("moe_layers", "layer numbers must ascend, each once")


def _integer(field: str, value: int, lowest: int, highest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise InvalidInput(field, f"{value!r} is not an integer from {lowest} to {highest}")
