"""Checkpoints with Hugging Face names: Mixtral and the Qwen-MoE families, by their `config.json` and safetensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moebus.engine.paddle.config import ModelConfig
from moebus.engine.port import EngineRefused
from moebus.schemas.errors import InvalidInput

EMBEDDING = "model.embed_tokens.weight"
_SHARED_NAMES = {"embed.weight": EMBEDDING, "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}
_LAYER_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    **{f"attention.{one}.{kind}": f"self_attn.{one}_proj.{kind}" for one in "qkvo" for kind in ("weight", "bias")},
    **{f"attention.{one}_norm.weight": f"self_attn.{one}_norm.weight" for one in "qk"},
    **{f"mlp.{part}.weight": f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
    **{f"moe.shared.{part}.weight": f"mlp.shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")},
    "moe.shared_gate.weight": "mlp.shared_expert_gate.weight",
}
_MIXTRAL_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}
_ALWAYS = {"hidden_act": "silu", "rope_scaling": None, "attention_bias": False, "decoder_sparse_step": 1}
_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one weight comes about: from one matrix, which is [out, in] there, or from one of each expert."""

    sources: tuple[str, ...]
    transposed: bool
    stacked: bool


def is_hf(names: Collection[str]) -> bool:
    """Whether a checkpoint's tensors are named as Hugging Face names them."""
    return EMBEDDING in names


def recipes(shapes: Mapping[str, tuple[int, ...]], names: Collection[str]) -> dict[str, Recipe]:
    """For each weight of the model, where it is in a checkpoint with tensors `names`.

    Raises:
        EngineRefused: a tensor is missing, or one is there that the model has no use for.
    """
    made = {name: _recipe(name, shape, names) for name, shape in shapes.items()}
    used = {source for recipe in made.values() for source in recipe.sources}
    missing = sorted(used - set(names))
    if missing:
        raise EngineRefused(f"source: tensor {missing[0]!r} is missing ({len(missing)} in all)")
    unknown = sorted(name for name in set(names) - used if not name.endswith("rotary_emb.inv_freq"))
    if unknown:
        raise EngineRefused(f"source: tensor {unknown[0]!r} is not one of this model ({len(unknown)} in all)")
    return made


def _recipe(name: str, shape: tuple[int, ...], names: Collection[str]) -> Recipe:
    if name in _SHARED_NAMES:
        source = _SHARED_NAMES[name]
        tied = name == "head.weight" and source not in names
        return Recipe((EMBEDDING if tied else source,), name == "head.weight", False)
    kind, _, rest = name.partition(".")
    number, _, rest = rest.partition(".")
    if kind != "layers":
        raise EngineRefused(f"source: a Hugging Face checkpoint has no {name!r}; leave draft layers out of the config")
    prefix = f"model.layers.{number}."
    moe = prefix + ("block_sparse_moe." if f"{prefix}block_sparse_moe.gate.weight" in names else "mlp.")
    if rest == "moe.router.weight":
        return Recipe((moe + "gate.weight",), True, False)
    if rest.startswith("moe.experts."):
        part = rest.split(".")[2]
        part = _MIXTRAL_PARTS[part] if moe.endswith("sparse_moe.") else f"{part}_proj"
        return Recipe(tuple(f"{moe}experts.{index}.{part}.weight" for index in range(shape[0])), True, True)
    return Recipe((prefix + _LAYER_NAMES[rest],), len(shape) == 2, False)


def model_config(hf: Mapping[str, Any], **engine: Any) -> ModelConfig:
    """The model that a Hugging Face `config.json` describes; `engine`: fields that are not the model's (`num_blocks`).

    Raises:
        InvalidInput: another family, or something of this one that the engine does not compute.
    """
    family = hf.get("model_type")
    if family not in _FAMILIES:
        raise InvalidInput("model_type", f"{family!r}; the engine loads {', '.join(_FAMILIES)}")
    for field, expected in _ALWAYS.items():
        if hf.get(field, expected) != expected:
            raise InvalidInput(field, f"{hf[field]!r}; the engine computes {expected!r}")
    if hf.get("sliding_window") is not None and hf.get("use_sliding_window", family == "mixtral"):
        raise InvalidInput("sliding_window", "the engine attends to everything")
    rope = hf.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        raise InvalidInput("rope_parameters", f"rope_type {rope['rope_type']!r}; the engine computes 'default'")
    eos = hf.get("eos_token_id")
    try:
        fields = {
            "vocab_size": hf["vocab_size"],
            "hidden_size": hf["hidden_size"],
            "num_layers": hf["num_hidden_layers"],
            "first_dense_layers": _dense_first(hf.get("mlp_only_layers") or []),
            "num_heads": hf["num_attention_heads"],
            "num_kv_heads": hf.get("num_key_value_heads") or hf["num_attention_heads"],
            "num_experts": hf["num_local_experts" if family == "mixtral" else "num_experts"],
            "top_k": hf["num_experts_per_tok"],
            "intermediate_size": hf["intermediate_size"],
            "moe_intermediate_size": hf["intermediate_size" if family == "mixtral" else "moe_intermediate_size"],
            "rope_theta": float(hf.get("rope_theta", rope.get("rope_theta", 10_000.0))),
            "norm_eps": float(hf["rms_norm_eps"]),
            "max_position": hf["max_position_embeddings"],
            "head_size": hf.get("head_dim") or 0,
            "eos_token_ids": tuple(eos) if isinstance(eos, (list, tuple)) else () if eos is None else (eos,),
            "norm_topk": family == "mixtral" or bool(hf.get("norm_topk_prob", False)),
            "qk_norm": family == "qwen3_moe",
            "attention_bias": family == "qwen2_moe",
            **_shared(hf, family),
        }
    except KeyError as error:
        raise InvalidInput(str(error.args[0]), f"missing in the config of a {family} model") from error
    return ModelConfig(**{**fields, **engine})


def _shared(hf: Mapping[str, Any], family: str) -> dict[str, Any]:
    if family != "qwen2_moe":
        return {}
    size, expert = hf["shared_expert_intermediate_size"], hf["moe_intermediate_size"]
    if size % expert:
        raise InvalidInput("shared_expert_intermediate_size", f"{size} is no multiple of {expert}")
    return {"shared_experts": size // expert, "shared_gate": True}


def _dense_first(layers: Sequence[int]) -> int:
    if sorted(layers) != list(range(len(layers))):
        raise InvalidInput("mlp_only_layers", f"{list(layers)}; dense layers have to come first")
    return len(layers)
