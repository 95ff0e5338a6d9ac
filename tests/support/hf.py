"""Tiny checkpoints of the Hugging Face families, and their forward in plain numpy as the families define it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Config = dict[str, Any]
Tensors = dict[str, Floats]

COMMON: Config = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "max_position_embeddings": 256,
    "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": 7,
}  # fmt: skip
CONFIGS: dict[str, Config] = {
    "mixtral": {
        **COMMON, "model_type": "mixtral", "intermediate_size": 24, "num_local_experts": 6, "sliding_window": None,
    },
    "qwen2_moe": {
        **COMMON, "model_type": "qwen2_moe", "intermediate_size": 40, "moe_intermediate_size": 12, "num_experts": 6,
        "shared_expert_intermediate_size": 24, "norm_topk_prob": False, "use_sliding_window": False,
        "sliding_window": 64, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "qwen3_moe": {
        **COMMON, "model_type": "qwen3_moe", "intermediate_size": 40, "moe_intermediate_size": 12, "num_experts": 6,
        "head_dim": 12, "norm_topk_prob": True, "attention_bias": False, "mlp_only_layers": [0],
    },
}  # fmt: skip


def head_dim(config: Config) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def tensors(config: Config, seed: int) -> Tensors:
    """All tensors of a checkpoint; matrices are [out, in]."""
    draw = np.random.default_rng(seed)
    hidden, head = config["hidden_size"], head_dim(config)
    made: Tensors = {}

    def put(name: str, *shape: int) -> None:
        values = draw.standard_normal(shape, dtype=np.float32)
        scaled = values / np.float32(shape[-1] ** 0.5) if len(shape) == 2 else 1 + values / 4
        made[name] = scaled.astype(np.float32)

    put("model.embed_tokens.weight", config["vocab_size"], hidden)
    put("lm_head.weight", config["vocab_size"], hidden)
    put("model.norm.weight", hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        put(prefix + "input_layernorm.weight", hidden)
        put(prefix + "post_attention_layernorm.weight", hidden)
        for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            put(f"{prefix}self_attn.{name}_proj.weight", config[heads] * head, hidden)
            if config["model_type"] == "qwen2_moe":
                put(f"{prefix}self_attn.{name}_proj.bias", config[heads] * head)
        put(prefix + "self_attn.o_proj.weight", hidden, config["num_attention_heads"] * head)
        if config["model_type"] == "qwen3_moe":
            put(prefix + "self_attn.q_norm.weight", head)
            put(prefix + "self_attn.k_norm.weight", head)
        _put_mlp(config, layer, prefix, put)
    return made


def _put_mlp(config: Config, layer: int, prefix: str, put: Any) -> None:
    hidden = config["hidden_size"]
    if layer in config.get("mlp_only_layers", []):
        _put_gated(put, prefix + "mlp.{}_proj.weight", ("gate", "up", "down"), hidden, config["intermediate_size"])
        return
    mixtral = config["model_type"] == "mixtral"
    moe = prefix + ("block_sparse_moe." if mixtral else "mlp.")
    count = config["num_local_experts" if mixtral else "num_experts"]
    inner = config["intermediate_size" if mixtral else "moe_intermediate_size"]
    put(moe + "gate.weight", count, hidden)
    for expert in range(count):
        name = f"{moe}experts.{expert}." + ("{}.weight" if mixtral else "{}_proj.weight")
        _put_gated(put, name, ("w1", "w3", "w2") if mixtral else ("gate", "up", "down"), hidden, inner)
    if config["model_type"] == "qwen2_moe":
        shared = config["shared_expert_intermediate_size"]
        _put_gated(put, moe + "shared_expert.{}_proj.weight", ("gate", "up", "down"), hidden, shared)
        put(moe + "shared_expert_gate.weight", 1, hidden)


def _put_gated(put: Any, name: str, parts: tuple[str, str, str], hidden: int, inner: int) -> None:
    gate, up, down = parts
    put(name.format(gate), inner, hidden)
    put(name.format(up), inner, hidden)
    put(name.format(down), hidden, inner)


def save(folder: Path, config: Config, made: Tensors, shards: int = 2) -> Path:
    """`config.json` and sharded safetensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(made)
    for shard in range(shards):
        part = {name: np.ascontiguousarray(made[name]) for name in names[shard::shards]}
        save_file(part, folder / f"model-{shard:05}-of-{shards:05}.safetensors")
    return folder


def save_bf16(path: Path, made: Tensors) -> Tensors:
    """One file of bfloat16 (cut off, not rounded); returns the values that it holds."""
    header: dict[str, Any] = {}
    body = b""
    for name, values in made.items():
        halves = (values.view(np.uint32) >> 16).astype("<u2").tobytes()
        header[name] = {
            "dtype": "BF16", "shape": list(values.shape), "data_offsets": [len(body), len(body) + len(halves)],
        }  # fmt: skip
        body += halves
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return {name: (values.view(np.uint32) & 0xFFFF0000).view(np.float32) for name, values in made.items()}


def forward(
    config: Config, w: Tensors, tokens: npt.NDArray[np.int64]
) -> tuple[Floats, dict[int, npt.NDArray[np.int64]]]:
    """Logits [n, vocab] and the experts [n, top_k] of each MoE layer, likeliest first."""
    x = w["model.embed_tokens.weight"][tokens]
    routes: dict[int, Ids] = {}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        x = x + _attention(config, w, prefix + "self_attn.", _norm(config, x, w[prefix + "input_layernorm.weight"]))
        y = _norm(config, x, w[prefix + "post_attention_layernorm.weight"])
        if layer in config.get("mlp_only_layers", []):
            x = x + _gated(y, w, prefix + "mlp.{}_proj.weight", ("gate", "up", "down"))
        else:
            out, routes[layer] = _moe(config, w, prefix, y)
            x = x + out
    return _norm(config, x, w["model.norm.weight"]) @ w["lm_head.weight"].T, routes


def _norm(config: Config, x: Floats, weight: Floats) -> Floats:
    scaled: Floats = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(config["rms_norm_eps"])) * weight
    return scaled


def _attention(config: Config, w: Tensors, prefix: str, x: Floats) -> Floats:
    size, count = head_dim(config), len(x)
    parts = {}
    for name in "qkv":
        out = x @ w[f"{prefix}{name}_proj.weight"].T
        if f"{prefix}{name}_proj.bias" in w:
            out = out + w[f"{prefix}{name}_proj.bias"]
        out = out.reshape(count, -1, size)
        if f"{prefix}{name}_norm.weight" in w:
            out = _norm(config, out, w[f"{prefix}{name}_norm.weight"])
        parts[name] = out if name == "v" else _rotated(config, out)
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    k, v = np.repeat(parts["k"], group, axis=1), np.repeat(parts["v"], group, axis=1)
    scores = np.einsum("qhd,khd->hqk", parts["q"], k) / np.float32(size**0.5)
    scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
    mixed = np.einsum("hqk,khd->qhd", _softmax(scores), v).reshape(count, -1)
    result: Floats = mixed @ w[prefix + "o_proj.weight"].T
    return result


def _rotated(config: Config, x: Floats) -> Floats:
    size = x.shape[-1]
    frequencies = config["rope_theta"] ** (-np.arange(0, size, 2) / size)
    angles = np.arange(len(x))[:, None] * frequencies
    cos, sin = (np.concatenate([f(angles)] * 2, axis=-1)[:, None].astype(np.float32) for f in (np.cos, np.sin))
    half = np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], axis=-1)
    rotated: Floats = (x * cos + half * sin).astype(np.float32)
    return rotated


def _moe(config: Config, w: Tensors, prefix: str, x: Floats) -> tuple[Floats, Ids]:
    mixtral = config["model_type"] == "mixtral"
    moe = prefix + ("block_sparse_moe." if mixtral else "mlp.")
    scores = _softmax(x @ w[moe + "gate.weight"].T)
    chosen = np.argsort(-scores, axis=-1, kind="stable")[:, : config["num_experts_per_tok"]]
    gates = np.take_along_axis(scores, chosen, axis=-1)
    if mixtral or config["norm_topk_prob"]:
        gates = gates / gates.sum(-1, keepdims=True)
    parts = ("w1", "w3", "w2") if mixtral else ("gate", "up", "down")
    out = np.zeros_like(x)
    for row, (experts, weights) in enumerate(zip(chosen, gates, strict=True)):
        for expert, weight in zip(experts, weights, strict=True):
            name = f"{moe}experts.{expert}." + ("{}.weight" if mixtral else "{}_proj.weight")
            out[row] += weight * _gated(x[row], w, name, parts)
    if moe + "shared_expert_gate.weight" in w:
        gate = 1 / (1 + np.exp(-(x @ w[moe + "shared_expert_gate.weight"].T)))
        out = out + gate * _gated(x, w, moe + "shared_expert.{}_proj.weight", ("gate", "up", "down"))
    return out, chosen


def _gated(x: Floats, w: Tensors, name: str, parts: tuple[str, str, str]) -> Floats:
    gate, up, down = (w[name.format(part)] for part in parts)
    inner = x @ gate.T
    result: Floats = (inner / (1 + np.exp(-inner)) * (x @ up.T)) @ down.T
    return result


def _softmax(x: Floats) -> Floats:
    raised = np.exp(x - x.max(-1, keepdims=True))
    result: Floats = raised / raised.sum(-1, keepdims=True)
    return result
