"""A batch in the layouts of other systems: exact shapes and types, and back again."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moebus.consumers.reader.batch import RouteBatch, Shape, build_batch
from moebus.schemas import layouts
from moebus.schemas.dtypes import fastdeploy_dtype, fill_value
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.route_errors import RouteDeleted
from tests.support.routes import CARD, make_routes
from tests.unit.routes.test_batch import SHAPE, rollout

CASES = json.loads((Path(__file__).parents[2] / "cases" / "dtypes.json").read_text())
LAYERS, TOP_K, EXPERTS = CARD.moe_layers, CARD.top_k, CARD.num_experts


def batch(card: ModelCard = CARD, *, tokens: bool = True) -> RouteBatch:
    """Two rollouts of 5 and 3 tokens, of which 4 and 2 were forwarded."""
    found = [rollout(4, 1, card), rollout(2, 2, card)]
    shape = Shape(card.moe_layers, card.top_k, card.num_experts)
    return build_batch([one.ref for one in found], found, shape, [5, 3] if tokens else None)


@pytest.mark.parametrize("tokens", [True, False])
def test_slime_and_miles(tokens: bool) -> None:
    first, second = batch(tokens=tokens).export.slime()
    assert (first.shape, first.dtype) == ((4, 3, 2), np.dtype(np.int32))
    assert second.shape == (2, 3, 2)
    assert np.array_equal(layouts.from_slime(first, EXPERTS), make_routes(4, seed=1))
    assert layouts.from_slime(first, EXPERTS).dtype == np.uint8
    assert np.array_equal(batch().export.miles()[1], second)
    wide = batch().export.slime(num_hidden_layers=7)[0]
    assert wide.shape == (4, 7, 2)
    assert np.array_equal(wide[:, list(LAYERS)], first)
    assert not wide[:, [0, 3, 4, 6]].any()


@pytest.mark.parametrize("tokens", [True, False])
def test_verl(tokens: bool) -> None:
    first, second = batch(tokens=tokens).export.verl()
    assert (first.shape, first.dtype) == ((5, 3, 2), np.dtype(np.int16))
    assert second.shape == (3, 3, 2)
    assert not first[-1].any()
    assert np.array_equal(layouts.from_verl(first, EXPERTS), make_routes(4, seed=1))
    assert batch().export.verl(num_hidden_layers=7)[0].shape == (5, 7, 2)


def test_verl_has_no_ids_beyond_int16() -> None:
    with pytest.raises(InvalidInput, match="40000 experts"):
        batch(ModelCard(40_000, 2, LAYERS)).export.verl()


@pytest.mark.parametrize("tokens", [True, False])
def test_sglang(tokens: bool) -> None:
    first, second = batch(tokens=tokens).export.sglang(num_hidden_layers=6)
    assert isinstance(first, str)
    flat = np.frombuffer(base64.b64decode(first), "<i4")
    assert flat.size == 4 * 6 * 2  # no shape is sent
    wide = flat.reshape(4, 6, 2)
    assert np.array_equal(wide[:, list(LAYERS)], make_routes(4, seed=1))
    assert not wide[:, [0, 3, 4]].any()
    back = layouts.from_sglang(second, LAYERS, TOP_K, EXPERTS, 6)
    assert np.array_equal(back, make_routes(2, seed=2))
    with pytest.raises(InvalidInput, match="layer 5 routes"):
        batch().export.sglang(num_hidden_layers=5)


@pytest.mark.parametrize("tokens", [True, False])
def test_fastdeploy_fused_and_per_layer(tokens: bool) -> None:
    fused = batch(tokens=tokens).export.fastdeploy(max_model_len=9)
    assert [one.shape for one in fused] == [(3, 9, 2)] * 2
    assert fused[0].dtype == np.uint8
    assert (fused[0][:, 4:] == 255).all()
    assert np.array_equal(fused[0][:, :4].transpose(1, 0, 2), make_routes(4, seed=1))
    assert np.array_equal(layouts.from_fastdeploy(fused[1], EXPERTS), make_routes(2, seed=2))
    layered = batch(tokens=tokens).export.fastdeploy_layers(max_model_len=9)
    assert [one.shape for one in layered[0]] == [(9, 2)] * 3
    assert np.array_equal(np.stack(layered[0]), fused[0])


def test_fastdeploy_refuses_a_rollout_that_is_too_long() -> None:
    with pytest.raises(InvalidInput, match="max_model_len"):
        batch().export.fastdeploy(max_model_len=3)
    assert batch().export.fastdeploy(max_model_len=4)[0].shape == (3, 4, 2)  # the last token of 5 has no row


def test_a_row_without_routes_is_all_ones_for_fastdeploy() -> None:
    one = rollout(2)
    gone = build_batch([one.ref, rollout(2, 2).ref], [one, RouteDeleted("removed")], SHAPE)
    assert (gone.export.fastdeploy(4)[1] == 255).all()
    with pytest.raises(InvalidInput, match="rollout 1 of the batch is absent"):
        gone.export.slime()


@pytest.mark.parametrize(("experts", "dtype", "fill"), CASES["fastdeploy_export"])
def test_types_of_fastdeploy(experts: int, dtype: str, fill: int) -> None:
    routes = np.array([[[0, experts - 1]]], np.uint32)
    padded = layouts.to_fastdeploy(routes, experts, 2)
    assert padded.dtype == np.dtype(dtype) == fastdeploy_dtype(experts)
    assert fill_value(padded.dtype) == fill
    assert padded[0, 0].tolist() == [0, experts - 1]
    assert padded[0, 1].tolist() == [fill, fill]
    assert layouts.from_fastdeploy(padded, experts).tolist() == [[[0, experts - 1]]]


def test_shared_experts_count_for_the_type() -> None:
    assert layouts.to_fastdeploy(make_routes(1), 254, 1).dtype == np.uint8
    assert layouts.to_fastdeploy(make_routes(1), 254, 1, shared_experts=1).dtype == np.uint16


@pytest.mark.parametrize("experts", [384, 512])
def test_many_experts_go_round_trip(experts: int) -> None:
    card = ModelCard(experts, 8, (0, 1))
    one = batch(card)
    want = make_routes(4, card, 1)
    assert np.array_equal(layouts.from_fastdeploy(one.export.fastdeploy(5)[0], experts), want)
    assert np.array_equal(layouts.from_sglang(one.export.sglang(2)[0], (0, 1), 8, experts, 2), want)
    assert np.array_equal(layouts.from_slime(one.export.slime()[0], experts), want)
    assert np.array_equal(layouts.from_verl(one.export.verl()[0], experts), want)


def test_one_token_and_none_forwarded() -> None:
    one = rollout(0)
    alone = build_batch([one.ref], [one], SHAPE, [1])
    assert alone.export.slime()[0].shape == (0, 3, 2)
    assert alone.export.verl()[0].tolist() == [[[0, 0]] * 3]
    assert alone.export.sglang(6) == [""]
    assert (alone.export.fastdeploy(2)[0] == 255).all()


def test_the_wrong_layout_is_refused() -> None:
    padded = layouts.to_fastdeploy(make_routes(2), EXPERTS, 4)
    torn = padded.copy()
    torn[1, 1] = 255
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: layouts.from_fastdeploy(padded.astype(np.int64), EXPERTS), "unsigned"),
        (lambda: layouts.from_fastdeploy(torn, EXPERTS), "same rows"),
        (lambda: layouts.from_fastdeploy(padded, 3), "experts"),
        (lambda: layouts.from_slime(make_routes(2), EXPERTS), "int32"),
        (lambda: layouts.from_verl(np.ones((2, 3, 2), np.int16), EXPERTS), "last row"),
        (lambda: layouts.from_verl(np.ones((2, 3, 2), np.int32), EXPERTS), "int16"),
        (lambda: layouts.from_sglang("%%", LAYERS, 2, EXPERTS, 6), "base64"),
        (lambda: layouts.from_sglang("AAAA", LAYERS, 2, EXPERTS, 6), "whole rows"),
    ]
    for call, why in refused:
        with pytest.raises(InvalidInput, match=why):
            call()


def test_as_a_rectangle() -> None:
    one = batch()
    padded = one.padded()
    assert padded.routes.shape == (2, 5, 3, 2)
    assert padded.valid.tolist() == [[True] * 4 + [False], [True, True, False, False, False]]
    assert np.array_equal(padded.routes[0], one.routes[:5])
    assert np.array_equal(padded.routes[1, :3], one.routes[5:])
    left = one.padded(7, offsets=[0, 4])
    assert np.array_equal(left.routes[1, 4:7], one.routes[5:])
    assert left.valid[1].tolist() == [False] * 4 + [True, True, False]
    ordered = np.sort(left.routes, axis=-1)
    assert int(left.routes.max()) < EXPERTS
    assert not (ordered[..., 1:] == ordered[..., :-1]).any()
    with pytest.raises(InvalidInput, match="length"):
        one.padded(4)
    for offsets in ([1], [0, -1]):
        with pytest.raises(InvalidInput, match="offsets"):
            one.padded(offsets=offsets)


def test_torch_shares_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    one = batch()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InvalidInput, match="not installed"):
        one.torch()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=lambda array: array))
    given = one.torch()
    assert given.routes is one.routes
    assert given.valid is one.valid
    assert given.cu_seqlens is one.cu_seqlens
