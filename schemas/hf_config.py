"""What the `config.json` of a Hugging Face model says of its routing: experts, top-k, and the layers that route.

Names and rules are those of the families' public configs; each rule is named where it is applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeGuard

from moebus.schemas.errors import InvalidInput

Config = Mapping[str, object]
MAX_DEPTH = 65_536

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = (
    "num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "experts_per_token", "num_experts_per_token",
    "top_k_experts",
)  # fmt: skip
_NESTED = ("text_config", "language_config", "llm_config", "thinker_config")
"""Where models of several modalities keep the config of their text part."""
_ROUTING = frozenset(["sparse", "moe", "E"])
"""Marks of a layer that routes: `mlp_layer_types` (GLM, ERNIE of transformers 5), `hybrid_override_pattern`."""


@dataclass(frozen=True, slots=True)
class HfRouting:
    """`layers`: global numbers of the layers that route. `depth`: all layers, those of a draft (MTP) left out."""

    num_experts: int
    top_k: int
    layers: tuple[int, ...]
    depth: int


def hf_routing(config: Config) -> HfRouting:
    """Reads a config; that of the text part where there is one.

    Raises:
        InvalidInput: naming the field that is missing, or that says what a router of one kind cannot be.
    """
    config = _text_part(config)
    experts, top_k = _same_everywhere(config, _EXPERTS), _same_everywhere(config, _TOP_K)
    depth = _required(config, "num_hidden_layers")
    if not 1 <= depth <= MAX_DEPTH:
        raise InvalidInput("num_hidden_layers", f"{depth} layers; 1 to {MAX_DEPTH} are allowed")
    layers = _listed(config, depth)
    if layers is None:
        layers = _ruled(config, depth)
    if not layers:
        raise InvalidInput("num_hidden_layers", f"none of the {depth} layers routes, by what this config says")
    return HfRouting(experts, top_k, layers, depth)


def _text_part(config: Config) -> Config:
    for name in _NESTED:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return _text_part(inner)
    return config


def _same_everywhere(config: Config, names: tuple[str, ...]) -> int:
    """A number, or a list with it for each layer (Hunyuan's `moe_topk`): one record of routes has one top-k."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if isinstance(value, (list, tuple)):
            if not value or len(set(map(repr, value))) > 1 or len(value) != config.get("num_hidden_layers"):
                raise InvalidInput(name, "a list that does not give every layer the same number; routes have one shape")
            value = value[0]
        if not _is_count(value) or value < 1:
            raise InvalidInput(name, f"{value!r} is not an integer of at least 1: no router")
        return value
    raise InvalidInput(names[0], f"the model's config has none of {', '.join(names)}")


def _listed(config: Config, depth: int) -> tuple[int, ...] | None:
    """The layers that route where the config lists them; None where it has a rule."""
    numbers = config.get("moe_layers_enum") or config.get("moe_layers")  # Step-3 "3,4,5"; Llama 4 [1, 3], or null
    if numbers is not None:
        name = "moe_layers_enum" if config.get("moe_layers_enum") else "moe_layers"
        return _numbers(name, numbers, depth)
    for name in ("mlp_layer_types", "moe_layer_freq", "is_moe_layer", "hybrid_override_pattern"):
        marks = config.get(name)
        if isinstance(marks, (list, tuple)) or (isinstance(marks, str) and name == "hybrid_override_pattern"):
            if len(marks) < depth:
                raise InvalidInput(name, f"{len(marks)} entries for {depth} layers")
            return tuple(layer for layer in range(depth) if _marked(name, marks[layer]))
    return None


def _marked(name: str, mark: object) -> bool:
    if isinstance(mark, str):
        return mark in _ROUTING
    if mark in (0, 1):  # MiMo's and MiniMax's moe_layer_freq; true and false
        return bool(mark)
    raise InvalidInput(name, f"{mark!r} does not say whether a layer routes")


def _numbers(name: str, value: object, depth: int) -> tuple[int, ...]:
    parts: Iterable[object]
    if isinstance(value, str):
        parts = [int(part) if part.strip().isdecimal() else part for part in value.split(",") if part.strip()]
    elif isinstance(value, (list, tuple)):
        parts = value
    else:
        raise InvalidInput(name, f"a list of layer numbers is needed, not {type(value).__name__}")
    found: set[int] = set()
    for part in parts:
        if not _is_count(part):
            raise InvalidInput(name, f"{part!r} is not the number of a layer")
        found.add(part)
    return tuple(sorted(layer for layer in found if layer < depth))  # those beyond are of a draft


def _ruled(config: Config, depth: int) -> tuple[int, ...]:
    """The layers that route, by each family's own rule."""
    if config.get("moe_layer_start_index") is not None:  # ERNIE; an end of -1 is the last layer
        first, last = _required(config, "moe_layer_start_index"), config.get("moe_layer_end_index")
        end = depth if last in (None, -1) else min(_required(config, "moe_layer_end_index") + 1, depth)
        step = _step(config, "moe_layer_interval")
        return tuple(layer for layer in range(first, end) if (layer + 1) % step == 0)
    if config.get("expert_layer_period") is not None:  # Jamba
        step, offset = _step(config, "expert_layer_period"), _skipped(config, "expert_layer_offset")
        return tuple(layer for layer in range(depth) if layer % step == offset)
    dense = max(
        _skipped(config, "first_k_dense_replace"),  # DeepSeek, Kimi, GLM, Ling
        _skipped(config, "num_dense_layers"),  # LFM2, AFMoE
        _skipped(config, "moe_layer_num_skipped"),  # Hunyuan
    )
    every = _step(config, "moe_layer_freq")  # DeepSeek
    step = max(_step(config, "decoder_sparse_step"), _step(config, "interleave_moe_layer_step"))  # Qwen, Llama 4
    plain = set(_numbers("mlp_only_layers", config.get("mlp_only_layers") or [], depth))  # Qwen: dense at any step
    return tuple(
        layer for layer in range(dense, depth) if layer % every == 0 and (layer + 1) % step == 0 and layer not in plain
    )


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _required(config: Config, name: str) -> int:
    value = config.get(name)
    if value is None:
        raise InvalidInput(name, f"the model's config has no {name}")
    if not _is_count(value):
        raise InvalidInput(name, f"{value!r} is not an integer of at least 0")
    return value


def _skipped(config: Config, name: str) -> int:
    return 0 if config.get(name) is None else _required(config, name)


def _step(config: Config, name: str) -> int:
    value = 1 if config.get(name) is None else _required(config, name)
    if value < 1:
        raise InvalidInput(name, f"{value}: a step of at least 1 is needed")
    return value
