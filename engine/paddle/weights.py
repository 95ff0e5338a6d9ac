"""Weights as host arrays: names and shapes, seeded initialisation, the digest, safetensors files."""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from moebus.engine.paddle.config import ModelConfig

Arrays = dict[str, npt.NDArray[np.float32]]
"""Weights by name, C order."""

DIGEST_KEY = "xxh3."
"""Before a tensor's name: the metadata entry of a safetensors file that holds its digest."""


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every weight's name and shape. Matrices are [in, out]; those of experts are stacked, [experts, in, out]."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= _layer(config, f"layers.{layer}.", dense=layer < config.first_dense_layers)
    shapes |= {"norm.weight": (hidden,), "head.weight": (hidden, config.vocab_size)}
    for draft in range(config.draft_layers):
        prefix = f"draft.{draft}."
        shapes |= {prefix + "hidden_norm.weight": (hidden,), prefix + "embed_norm.weight": (hidden,)}
        shapes |= {prefix + "join.weight": (2 * hidden, hidden), **_layer(config, prefix, dense=False)}
        shapes[prefix + "norm.weight"] = (hidden,)
    return shapes


def _layer(config: ModelConfig, prefix: str, *, dense: bool) -> dict[str, tuple[int, ...]]:
    hidden, head = config.hidden_size, config.head_dim
    q, kv = config.num_heads * head, config.num_kv_heads * head
    shapes: dict[str, tuple[int, ...]] = {prefix + "attention_norm.weight": (hidden,)}
    for name, out in (("q", q), ("k", kv), ("v", kv)):
        shapes[f"{prefix}attention.{name}.weight"] = (hidden, out)
        if config.attention_bias:
            shapes[f"{prefix}attention.{name}.bias"] = (out,)
    shapes[prefix + "attention.o.weight"] = (q, hidden)
    if config.qk_norm:
        shapes |= {f"{prefix}attention.{name}_norm.weight": (head,) for name in "qk"}
    shapes[prefix + "mlp_norm.weight"] = (hidden,)
    if dense:
        return shapes | _mlp(prefix + "mlp", (), hidden, config.intermediate_size)
    shapes[prefix + "moe.router.weight"] = (hidden, config.num_experts)
    shapes |= _mlp(prefix + "moe.experts", (config.num_experts,), hidden, config.moe_intermediate_size)
    if config.shared_experts:
        shapes |= _mlp(prefix + "moe.shared", (), hidden, config.shared_experts * config.moe_intermediate_size)
        if config.shared_gate:
            shapes[prefix + "moe.shared_gate.weight"] = (hidden, 1)
    return shapes


def _mlp(name: str, stack: tuple[int, ...], hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    into = (*stack, hidden, inner)
    return {f"{name}.gate.weight": into, f"{name}.up.weight": into, f"{name}.down.weight": (*stack, inner, hidden)}


def random_weights(config: ModelConfig, seed: int) -> Arrays:
    """Weights drawn from `seed`: norms one, biases zero, matrices normal with variance 1 / inputs, a quarter of that
    for routers.

    Small router logits make the top-k as undecided as in a model trained for balanced experts.
    """
    arrays: Arrays = {}
    for index, (name, shape) in enumerate(weight_shapes(config).items()):
        if len(shape) == 1:
            arrays[name] = np.full(shape, 0 if name.endswith("bias") else 1, dtype=np.float32)
            continue
        draw = np.random.default_rng([seed, index]).standard_normal(shape, dtype=np.float32)
        scale = 1.0 if name == "embed.weight" else 1 / math.sqrt(shape[-2])
        arrays[name] = draw * np.float32(scale / 2 if name.endswith("router.weight") else scale)
    return arrays


def weights_digest(arrays: Mapping[str, npt.NDArray[np.float32]]) -> str:
    """XXH3-128, 32 hex digits: for each tensor in order of name its name, shape and little-endian values."""
    state = xxhash.xxh3_128()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name], dtype="<f4")
        state.update(f"{name}\0{','.join(map(str, array.shape))}\0".encode())
        state.update(array.reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def tensor_digest(array: npt.NDArray[np.float32]) -> str:
    """XXH3-128, 32 hex digits, of one tensor: its shape and little-endian values."""
    values = np.ascontiguousarray(array, dtype="<f4")
    state = xxhash.xxh3_128(f"{','.join(map(str, values.shape))}\0".encode())
    state.update(values.reshape(-1).view(np.uint8).data)
    return state.hexdigest()


def save_weights(path: str | os.PathLike[str], arrays: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Writes one safetensors file with the digest of each tensor: beside the target first, then renamed, so that no
    reader sees half of it."""
    from safetensors.numpy import save_file

    target = Path(path)
    draft = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        digests = {DIGEST_KEY + name: tensor_digest(array) for name, array in arrays.items()}
        save_file(dict(arrays), draft, metadata=digests)
        with draft.open("rb") as stream:
            os.fsync(stream.fileno())
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
