"""Draft (multi-token prediction) layers: they run, they propose, and their routes are recorded nowhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moebus.engine.paddle import PaddleEngine
from moebus.engine.paddle.weights import random_weights, save_weights, weight_shapes, weights_digest
from moebus.engine.port import EngineRefused
from moebus.schemas.errors import InvalidInput
from moebus.schemas.tags import Tag
from tests.support.deadlines import Left
from tests.support.exact import check_exact
from tests.support.generate import random_prompts
from tests.support.paddle import SMALL, needs_paddle

DRAFTING = replace(SMALL, draft_layers=2, num_blocks=24, max_batch=4, cpu_blocks=64, prefill_chunk=20)
PROMPTS = random_prompts(4, (30, 50), SMALL.vocab_size, 3, max_tokens=20)


def test_the_card_has_the_models_own_layers_only() -> None:
    assert DRAFTING.card() == SMALL.card()
    added = set(weight_shapes(DRAFTING)) - set(weight_shapes(SMALL))
    assert {name.split(".")[:2] == ["draft", "0"] or name.split(".")[:2] == ["draft", "1"] for name in added} == {True}
    assert weight_shapes(DRAFTING)["draft.1.join.weight"] == (64, 32)
    with pytest.raises(InvalidInput, match="draft_layers"):
        replace(SMALL, draft_layers=-1)


@needs_paddle
@pytest.mark.paddle
def test_routes_and_tokens_are_those_of_the_model_without_them() -> None:
    engines = [PaddleEngine.create(config, seed=1) for config in (DRAFTING, SMALL)]
    try:
        drafting, plain = (engine.generate_many(PROMPTS, 60) for engine in engines)
        for one, other in zip(drafting, plain, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert np.array_equal(one.routes, other.routes)  # type: ignore[arg-type]
        check_exact(engines[0], PROMPTS, drafting)
        proposed, accepted = engines[0].drafts
        assert proposed == 4 * 19, "each step but the first has one to check"
        assert 0 <= accepted < proposed, "random weights guess badly"
        assert engines[1].drafts == (0, 0)
    finally:
        for engine in engines:
            engine.close()


@needs_paddle
@pytest.mark.paddle
def test_they_are_in_memory_files_and_digests(tmp_path: Path) -> None:
    engine = PaddleEngine.create(DRAFTING, seed=1, allowed_roots=(str(tmp_path),))
    try:
        held = engine.inspect().bytes_by_tag
        engine.pause("abort", Left())
        assert engine.sleep(Tag.WEIGHT, "offload", Left()) == held[Tag.WEIGHT]
        assert engine.wakeup(Tag.WEIGHT, "restore", Left()) == held[Tag.WEIGHT]
        save_weights(tmp_path / "without.safetensors", random_weights(SMALL, 2))
        with pytest.raises(EngineRefused, match=r"draft\.0.*missing"):
            engine.stage("v2", str(tmp_path / "without.safetensors"), None, Left())
        arrays = random_weights(DRAFTING, 2)
        save_weights(tmp_path / "with.safetensors", arrays)
        engine.commit(engine.stage("v2", str(tmp_path / "with.safetensors"), None, Left()), "reset", Left())
        assert engine.inspect().weights_digest == weights_digest(arrays)
    finally:
        engine.close()


@needs_paddle
@pytest.mark.paddle
def test_a_draft_that_is_always_right_is_counted_so() -> None:
    """A model that ignores its input repeats one token, and so does its draft layer."""
    engine = PaddleEngine.create(DRAFTING, seed=1)
    try:
        head = engine._weights.parameters["head.weight"]
        constant = np.zeros(head.shape, np.float32)
        head.set_value(constant)  # all logits are 0: the lowest id is the likeliest
        engine.generate_many(PROMPTS, 60)
        proposed, accepted = engine.drafts
        assert proposed == accepted == 4 * 19
    finally:
        engine.close()
