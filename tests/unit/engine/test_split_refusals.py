"""What a decode engine refuses, by name and before it does anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moebus.engine.paddle import HandoverRefused, PaddleEngine
from moebus.schemas.errors import InvalidInput
from tests.support.background import Background
from tests.support.deadlines import Left
from tests.support.paddle import SMALL, needs_paddle, write_weights
from tests.support.split_pair import PROMPT, Pair, equal, pair_of

pytestmark = [needs_paddle, pytest.mark.paddle]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with pair_of(tmp_path, replace(SMALL, block_size=16, num_blocks=24, max_batch=3)) as made:
        yield made


def test_other_weights_are_refused(pair: Pair, tmp_path: Path) -> None:
    handover = pair.hand()
    write_weights(tmp_path / "w.safetensors", 7)
    pair.second.pause("abort", Left())
    for version, source, text in (
        ("v7", str(tmp_path / "w.safetensors"), "prefilled by version 'initial', this engine serves 'v7'"),
        ("initial", str(tmp_path / "w.safetensors"), "version 'initial' is not the same there and here"),
    ):
        pair.second.commit(pair.second.stage(version, source, None, Left()), "reset", Left())
        pair.second.resume()
        with pytest.raises(HandoverRefused, match=text):
            pair.second.decode(handover, PROMPT, 30)
        assert pair.second.inspect().in_flight == 0
        pair.second.pause("abort", Left())
    pair.second.commit(pair.second.stage("initial", None, None, Left()), "reset", Left())
    pair.second.resume()
    equal(pair.second.decode(handover, PROMPT, 30), pair.one.generate(PROMPT, 30))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"request_id": "other"}, "request_id 'r0', not 'other'"),
        ({"seed": 4}, "seed 9, not 4"),
        ({"temperature": 0.5}, "temperature 1.0, not 0.5"),
        ({"top_p": 0.5}, "top_p 1.0, not 0.5"),
        ({"max_tokens": 0}, "0 tokens are asked for, it was prefilled for some"),
        ({"token_ids": PROMPT.token_ids[:-1]}, "other tokens"),
        ({"token_ids": (PROMPT.token_ids + 1) % 128}, "other tokens"),
    ],
)
def test_another_prompt_is_refused(pair: Pair, change: dict[str, object], text: str) -> None:
    handover = pair.hand()
    with pytest.raises(HandoverRefused, match=text):
        pair.second.decode(handover, replace(PROMPT, **change), 30)  # type: ignore[arg-type]
    assert pair.second.inspect().in_flight == 0


def test_nothing_sampled_is_refused_where_more_is_asked_for(pair: Pair) -> None:
    handover = pair.hand(replace(PROMPT, max_tokens=0))
    with pytest.raises(HandoverRefused, match="12 tokens are asked for, it was prefilled for none"):
        pair.second.decode(handover, PROMPT, 30)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_experts": 16}, "num_experts 8, not 16"),
        ({"rope_theta": 500.0}, "rope_theta"),
        ({"draft_layers": 1}, "draft_layers 0, not 1"),
    ],
)
def test_another_model_is_refused(pair: Pair, change: dict[str, int], text: str) -> None:
    other = PaddleEngine.create(replace(SMALL, **change), seed=1)  # type: ignore[arg-type]
    try:
        with pytest.raises(HandoverRefused, match=text):
            other.decode(pair.hand(), PROMPT, 30)
    finally:
        other.close()


def test_a_prompt_that_never_fits_is_refused(pair: Pair) -> None:
    handover = pair.hand()
    small = PaddleEngine.create(replace(SMALL, num_blocks=6), seed=1)
    try:
        with pytest.raises(InvalidInput, match="exceed 48 positions"):
            small.decode(handover, PROMPT, 30)
    finally:
        small.close()


def test_damage_in_memory_is_refused(pair: Pair) -> None:
    handover = pair.hand()
    for change in ({"keys": handover.keys[:, :-1]}, {"values": handover.values.astype(np.float64)}, {"routes": None}):
        with pytest.raises(HandoverRefused, match="shapes and types"):
            pair.second.decode(replace(handover, **change), PROMPT, 30)
    assert handover.routes is not None
    with pytest.raises(HandoverRefused, match="an expert"):
        pair.second.decode(replace(handover, routes=handover.routes + 8), PROMPT, 30)


def test_an_id_is_in_flight_once(pair: Pair) -> None:
    handover = pair.hand()
    pair.gate.close_after("step", 2)
    call = Background(lambda: pair.second.decode(handover, PROMPT, 30))
    pair.gate.wait_held()
    with pytest.raises(InvalidInput, match="in flight"):
        pair.second.decode(handover, PROMPT, 30)
    pair.gate.open()
    equal(call.result(), pair.one.generate(PROMPT, 30))


def test_bad_prompts_name_the_field(pair: Pair) -> None:
    handover = pair.hand()
    calls: list[Callable[[], object]] = [
        lambda: pair.first.prefill(replace(PROMPT, top_p=0.0), 30),
        lambda: pair.second.decode(handover, replace(PROMPT, top_p=0.0), 30),
    ]
    for call in calls:
        with pytest.raises(InvalidInput, match="top_p"):
            call()
