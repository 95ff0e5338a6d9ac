"""Model cards out of `config.json` files, family by family: names and rules as the public configs have them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moebus.schemas.errors import InvalidInput
from moebus.schemas.hf_config import hf_routing
from moebus.schemas.model_card import ModelCard

MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 32}
QWEN2_MOE = {
    "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
QWEN3_MOE = {
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
DEEPSEEK_V2 = {
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "num_hidden_layers": 27,
    "first_k_dense_replace": 1, "moe_layer_freq": 1,
}  # fmt: skip
DEEPSEEK_V3 = {
    "n_routed_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 61, "first_k_dense_replace": 3,
    "moe_layer_freq": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
GLM_45_AIR = {
    "n_routed_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 46, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
GLM_LISTED = {
    "n_routed_experts": 64, "num_experts_per_tok": 4, "num_hidden_layers": 4,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}  # fmt: skip
GPT_OSS = {"num_local_experts": 128, "experts_per_token": 4, "num_experts_per_tok": 4, "num_hidden_layers": 36}
GPT_OSS_OLD = {"num_local_experts": 32, "experts_per_token": 4, "num_hidden_layers": 24}
KIMI_LINEAR = {
    "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27, "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}  # fmt: skip
ERNIE = {
    "moe_num_experts": 64, "moe_k": 6, "num_hidden_layers": 28, "moe_layer_start_index": 1,
    "moe_layer_end_index": -1, "moe_layer_interval": 1,
}  # fmt: skip
LLAMA4 = {"num_local_experts": 128, "num_experts_per_tok": 1, "num_hidden_layers": 8, "interleave_moe_layer_step": 2}
STEP = {"moe_num_experts": 288, "moe_top_k": 8, "num_hidden_layers": 6, "moe_layers_enum": "3,4,5"}
MINIMAX_LISTED = {
    "num_local_experts": 128, "num_experts_per_tok": 4, "num_hidden_layers": 5, "moe_layer_freq": [0, 0, 0, 1, 1],
}  # fmt: skip
HUNYUAN = {"num_experts": 64, "moe_topk": [8] * 4, "num_hidden_layers": 4, "moe_layer_num_skipped": 0}
NEMOTRON = {
    "n_routed_experts": 128, "num_experts_per_tok": 6, "num_hidden_layers": 7, "hybrid_override_pattern": "MEM*EME",
}  # fmt: skip
JAMBA = {
    "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 8, "expert_layer_period": 2,
    "expert_layer_offset": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "experts", "top_k", "layers", "depth"),
    [
        (MIXTRAL, 8, 2, range(32), 32),
        (QWEN2_MOE, 60, 4, range(24), 24),
        (QWEN3_MOE, 128, 8, range(48), 48),
        ({**QWEN3_MOE, "decoder_sparse_step": 2}, 128, 8, range(1, 48, 2), 48),
        ({**QWEN3_MOE, "mlp_only_layers": [0, 47]}, 128, 8, range(1, 47), 48),
        ({"text_config": QWEN3_MOE, "vision_config": {"depth": 27}}, 128, 8, range(48), 48),  # Qwen3-VL-MoE
        ({"thinker_config": {"text_config": QWEN3_MOE}}, 128, 8, range(48), 48),  # Qwen3-Omni-MoE
        ({"language_config": DEEPSEEK_V2}, 64, 6, range(1, 27), 27),  # DeepSeek-VL2
        (DEEPSEEK_V2, 64, 6, range(1, 27), 27),
        ({**DEEPSEEK_V2, "moe_layer_freq": 2}, 64, 6, range(2, 27, 2), 27),
        (DEEPSEEK_V3, 256, 8, range(3, 61), 61),
        (GLM_45_AIR, 128, 8, range(1, 46), 46),
        (GLM_LISTED, 64, 4, range(1, 4), 4),
        (GPT_OSS, 128, 4, range(36), 36),
        (GPT_OSS_OLD, 32, 4, range(24), 24),
        (KIMI_LINEAR, 256, 8, range(1, 27), 27),
        (ERNIE, 64, 6, range(1, 28), 28),
        ({**ERNIE, "moe_layer_end_index": 20, "moe_layer_interval": 2}, 64, 6, range(1, 21, 2), 28),
        (LLAMA4, 128, 1, (1, 3, 5, 7), 8),
        ({**LLAMA4, "moe_layers": [3, 7]}, 128, 1, (3, 7), 8),
        ({**LLAMA4, "moe_layers": None}, 128, 1, (1, 3, 5, 7), 8),
        (STEP, 288, 8, (3, 4, 5), 6),
        ({**STEP, "moe_layers_enum": [3, 5, 6]}, 288, 8, (3, 5), 6),  # 6 is of the draft
        (MINIMAX_LISTED, 128, 4, (3, 4), 5),
        (HUNYUAN, 64, 8, range(4), 4),
        (NEMOTRON, 128, 6, (1, 4, 6), 7),
        (JAMBA, 16, 2, (1, 3, 5, 7), 8),
        ({"num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 6, "num_dense_layers": 2}, 32, 4,
         range(2, 6), 6),  # LFM2-MoE
    ],
)  # fmt: skip
def test_families(config: dict[str, Any], experts: int, top_k: int, layers: range, depth: int) -> None:
    card = ModelCard.from_hf_config(json.loads(json.dumps(config)), name="m")
    assert (card.num_experts, card.top_k, card.moe_layers) == (experts, top_k, tuple(layers))
    assert (card.num_hidden_layers, card.name) == (depth, "m")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({}, "num_experts"),
        ({"num_experts": 8, "num_hidden_layers": 4}, "num_experts_per_tok"),
        ({"num_experts": 8, "num_experts_per_tok": 2}, "num_hidden_layers"),
        ({**QWEN3_MOE, "num_experts": 0}, "num_experts"),
        ({**DEEPSEEK_V3, "n_routed_experts": None}, "num_experts"),
        ({**DEEPSEEK_V3, "n_routed_experts": "256"}, "n_routed_experts"),
        ({**QWEN3_MOE, "num_experts_per_tok": [2, 4]}, "num_experts_per_tok"),
        ({**HUNYUAN, "moe_topk": [8, 8, 8, 1]}, "moe_topk"),
        ({**HUNYUAN, "moe_topk": []}, "moe_topk"),
        ({**HUNYUAN, "moe_topk": [True] * 4}, "moe_topk"),
        ({**ERNIE, "moe_num_experts": [64, 64]}, "moe_num_experts"),  # ERNIE-VL: experts of text and of vision
        ({**QWEN3_MOE, "num_experts_per_tok": 129}, "top_k"),
        ({**QWEN3_MOE, "num_experts_per_tok": 0}, "num_experts_per_tok"),
        ({**QWEN3_MOE, "num_experts_per_tok": 2.0}, "num_experts_per_tok"),
        ({**QWEN3_MOE, "decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({**QWEN3_MOE, "mlp_only_layers": "0"}, None),  # a string of numbers is a list, as Step-3 has it
        ({**QWEN3_MOE, "mlp_only_layers": 3}, "mlp_only_layers"),
        ({**QWEN3_MOE, "mlp_only_layers": ["a"]}, "mlp_only_layers"),
        ({**QWEN3_MOE, "num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({**QWEN3_MOE, "num_hidden_layers": -1}, "num_hidden_layers"),
        ({**QWEN3_MOE, "num_hidden_layers": 5000}, "moe_layers"),
        ({**DEEPSEEK_V3, "first_k_dense_replace": "3"}, "first_k_dense_replace"),
        ({**DEEPSEEK_V3, "first_k_dense_replace": -1}, "first_k_dense_replace"),
        ({**DEEPSEEK_V3, "first_k_dense_replace": 61}, "num_hidden_layers"),
        ({**DEEPSEEK_V3, "moe_layer_freq": 0}, "moe_layer_freq"),
        ({**GLM_LISTED, "mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({**GLM_LISTED, "mlp_layer_types": [None] * 4}, "mlp_layer_types"),
        ({**MINIMAX_LISTED, "moe_layer_freq": [0, 0, 2, 1, 1]}, "moe_layer_freq"),
        ({**NEMOTRON, "hybrid_override_pattern": "ME"}, "hybrid_override_pattern"),
        ({**NEMOTRON, "hybrid_override_pattern": "M*-M*-M"}, "num_hidden_layers"),
        ({**STEP, "moe_layers_enum": "3,x"}, "moe_layers_enum"),
        ({**STEP, "moe_layers_enum": {"3": 1}}, "moe_layers_enum"),
        ({**STEP, "moe_layers_enum": "7"}, "num_hidden_layers"),
        ({**JAMBA, "expert_layer_period": 0}, "expert_layer_period"),
        ({**ERNIE, "moe_layer_start_index": [1, 1]}, "moe_layer_start_index"),
        ({**ERNIE, "moe_layer_end_index": "x"}, "moe_layer_end_index"),
        ({"text_config": {"num_hidden_layers": 4}}, "num_experts"),
    ],
)
def test_a_config_that_says_no_routing_is_refused_by_field(config: dict[str, Any], field: str | None) -> None:
    if field is None:
        assert 0 not in ModelCard.from_hf_config(config).moe_layers
        return
    with pytest.raises(InvalidInput) as caught:
        ModelCard.from_hf_config(config)
    assert caught.value.field == field


def test_the_depth_travels_and_does_not_count() -> None:
    card = ModelCard.from_hf_config(DEEPSEEK_V3)
    bare = ModelCard(256, 8, tuple(range(3, 61)))
    assert card == bare
    assert card.digest == bare.digest
    assert ModelCard.from_json(card.to_json()).num_hidden_layers == 61
    assert "num_hidden_layers" not in bare.to_dict()
    for depth in (60, 0, "61", 2**17):
        with pytest.raises(InvalidInput, match="num_hidden_layers"):
            ModelCard.from_dict({**bare.to_dict(), "num_hidden_layers": depth})


def test_lists_of_any_length_cost_nothing() -> None:
    many = {**QWEN3_MOE, "num_hidden_layers": 4096, "mlp_only_layers": list(range(1, 4096))}
    assert hf_routing(many).layers == (0,)
