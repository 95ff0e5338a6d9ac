"""Hugging Face checkpoints: loaded by name, and computed as the families define it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moebus.cli.engines import EngineKind, EngineOptions, make_engine
from moebus.engine.paddle import ModelConfig, PaddleEngine, full_recompute, model_config, replay_logprobs
from moebus.engine.paddle.files import load_weights
from moebus.engine.paddle.weights import Arrays, weight_shapes, weights_digest
from moebus.engine.port import EngineRefused, Prompt
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from tests.support import hf
from tests.support.deadlines import Left
from tests.support.exact import check_exact
from tests.support.paddle import needs_paddle

TOKENS = np.random.default_rng(1).integers(0, 96, 40)


def load(path: Path, config: ModelConfig) -> Arrays:
    return load_weights(str(path), [str(path)], weight_shapes(config), Left())


@needs_paddle
@pytest.mark.paddle
@pytest.mark.parametrize("family", hf.CONFIGS)
def test_logits_and_routes_are_the_familys(tmp_path: Path, family: str) -> None:
    described, made = hf.CONFIGS[family], hf.tensors(hf.CONFIGS[family], 5)
    config = model_config(described)
    weights = load(hf.save(tmp_path / "m", described, made), config)
    routes, logits = full_recompute(config, weights, TOKENS)
    expected, chosen = hf.forward(described, made, TOKENS)
    assert np.abs(logits - expected).max() < 1e-4
    assert tuple(chosen) == config.moe_layers
    assert np.array_equal(routes, np.stack([chosen[layer] for layer in config.moe_layers], axis=1))


@needs_paddle
@pytest.mark.paddle
@pytest.mark.parametrize("family", hf.CONFIGS)
def test_an_engine_serves_it_and_a_trainer_replays_it(tmp_path: Path, family: str) -> None:
    described = hf.CONFIGS[family]
    folder = hf.save(tmp_path / "m", described, hf.tensors(described, 5))
    config = model_config(described, block_size=8, num_blocks=64)
    engine = PaddleEngine.create(config, source=str(folder), allowed_roots=(str(tmp_path),))
    try:
        prompts = [Prompt(f"r{n}", TOKENS[: 20 + n], max_tokens=10, ignore_eos=True) for n in range(3)]
        results = engine.generate_many(prompts, 60)
        check_exact(engine, prompts, results)
        tokens = np.concatenate([prompts[0].token_ids, results[0].token_ids])
        replayed = replay_logprobs(config, engine.weights(), tokens, results[0].routes)
        assert np.abs(replayed[19:] - results[0].logprobs).max() < 2e-5
        eos = replace(prompts[0], ignore_eos=False, request_id="eos")
        assert (7 in results[0].token_ids) == (engine.generate(eos, 30).finish_reason == "stop")
    finally:
        engine.close()


@needs_paddle
@pytest.mark.paddle
def test_a_worker_starts_from_the_folder_as_it_is(tmp_path: Path) -> None:
    described = {**hf.CONFIGS["mixtral"], "eos_token_id": [3, 7]}
    folder = hf.save(tmp_path / "m", described, hf.tensors(described, 5))
    options = EngineOptions(EngineKind.PADDLE, 0, "hf", str(folder), folder / "config.json", (str(tmp_path),))
    engine, card = make_engine(options)
    try:
        assert engine.inspect().version == "hf"
        assert (card.num_experts, card.moe_layers) == (6, (0, 1))
        assert engine.generate(Prompt("r", TOKENS, max_tokens=1), 60).routes is not None
    finally:
        engine.close()


def test_the_config_says_what_the_family_is() -> None:
    mixtral, qwen2, qwen3 = (model_config(one) for one in hf.CONFIGS.values())
    assert (mixtral.first_dense_layers, mixtral.norm_topk, mixtral.qk_norm, mixtral.attention_bias) == (
        0,
        True,
        False,
        False,
    )
    assert (qwen2.shared_experts, qwen2.shared_gate, qwen2.norm_topk, qwen2.attention_bias) == (2, True, False, True)
    assert (qwen3.first_dense_layers, qwen3.head_dim, qwen3.qk_norm, qwen3.moe_layers) == (1, 12, True, (1,))
    assert all(config.eos_token_ids == (7,) for config in (mixtral, qwen2, qwen3))
    for described, config in zip(hf.CONFIGS.values(), (mixtral, qwen2, qwen3), strict=True):
        card = ModelCard.from_hf_config(described)
        assert (card.num_experts, card.top_k, card.moe_layers) == (config.num_experts, config.top_k, config.moe_layers)
    newer: dict[str, Any] = {k: v for k, v in hf.CONFIGS["mixtral"].items() if k != "rope_theta"}
    assert model_config({**newer, "rope_parameters": {"rope_theta": 9.0, "rope_type": "default"}}).rope_theta == 9.0
    assert model_config({**newer, "eos_token_id": [1, 2]}, num_blocks=9).eos_token_ids == (1, 2)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_local_experts": None}, "num_experts"),
    ],
)
def test_what_the_engine_does_not_compute_is_named(changes: dict[str, Any], field: str) -> None:
    described = {**hf.CONFIGS["mixtral"], **changes}
    if changes == {"num_local_experts": None}:
        del described["num_local_experts"]
        field = "num_local_experts"
    with pytest.raises(InvalidInput) as caught:
        model_config(described)
    assert caught.value.field == field


def test_dense_layers_have_to_come_first() -> None:
    with pytest.raises(InvalidInput, match="mlp_only_layers"):
        model_config({**hf.CONFIGS["qwen3_moe"], "mlp_only_layers": [1]})


def test_bfloat16_float16_and_tied_embeddings(tmp_path: Path) -> None:
    described = hf.CONFIGS["mixtral"]
    config, made = model_config(described), hf.tensors(described, 5)
    (tmp_path / "b").mkdir()
    held = hf.save_bf16(tmp_path / "b" / "model.safetensors", made)
    exact = load(hf.save(tmp_path / "f32", described, held), config)
    assert weights_digest(load(tmp_path / "b", config)) == weights_digest(exact)
    half = {name: values.astype(np.float16) for name, values in made.items()}
    loaded = load(hf.save(tmp_path / "f16", described, half), config)  # type: ignore[arg-type]
    assert np.array_equal(loaded["norm.weight"], half["model.norm.weight"].astype(np.float32))
    del held["lm_head.weight"]
    tied = load(hf.save(tmp_path / "tied", described, held, shards=1), config)
    assert np.array_equal(tied["head.weight"], held["model.embed_tokens.weight"].T)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"model.layers.1.block_sparse_moe.experts.4.w3.weight": None}, "experts.4.w3.weight' is missing"),
    "unknown": ({"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}, "q_proj.bias' is not one of"),
    "shape": ({"lm_head.weight": np.zeros((32, 96), np.float32)}, r"lm_head.weight' has shape \[32, 96\]"),
    "type": ({"model.norm.weight": np.zeros(32, np.int32)}, "norm.weight' is I32, the model needs F32 or BF16 or F16"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_checkpoints_are_refused(tmp_path: Path, kind: str) -> None:
    described = hf.CONFIGS["mixtral"]
    changes, text = BAD[kind]
    made = {name: values for name, values in {**hf.tensors(described, 5), **changes}.items() if values is not None}
    with pytest.raises(EngineRefused, match=text):
        load(hf.save(tmp_path / "m", described, made), model_config(described))


def test_draft_layers_are_not_in_such_a_checkpoint(tmp_path: Path) -> None:
    described = hf.CONFIGS["mixtral"]
    folder = hf.save(tmp_path / "m", described, hf.tensors(described, 5))
    with pytest.raises(EngineRefused, match="draft layers"):
        load(folder, model_config(described, draft_layers=1))
