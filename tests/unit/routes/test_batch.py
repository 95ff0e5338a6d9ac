"""RouteBatch: alignment with tokens, fills, layers by global number, absent rollouts."""

from __future__ import annotations

import numpy as np
import pytest

from moebus.consumers.reader.batch import Shape, build_batch, check_tokens
from moebus.consumers.reader.fill import fill_rows
from moebus.consumers.reader.rollout import Rollout, check_rollout
from moebus.schemas.attempt import attempt_text
from moebus.schemas.dtypes import RouteArray
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.route_errors import RouteCorrupt, RouteDeleted
from moebus.schemas.route_ref import RouteRef, token_hash
from tests.support.routes import CARD, attempt_id, make_routes, make_tokens

SHAPE = Shape(CARD.moe_layers, CARD.top_k, CARD.num_experts)


def rollout(rows: int, seed: int = 1, card: ModelCard = CARD, routes: RouteArray | None = None) -> Rollout:
    ref = RouteRef("run", f"r{seed}", 0, attempt_text(attempt_id(seed)), rows, token_hash=token_hash(make_tokens(rows)))
    data = make_routes(rows, card, seed) if routes is None else routes
    return Rollout(ref, data, card.moe_layers, card.top_k, card.num_experts, "complete")


@pytest.mark.parametrize(("rows", "top_k", "experts"), [(64, 2, 16), (7, 3, 7), (1000, 8, 384), (5, 1, 1), (3, 8, 8)])
def test_filled_rows_are_distinct_and_even(rows: int, top_k: int, experts: int) -> None:
    routes = np.full((rows, 4, top_k), 255, np.uint16)
    fill_rows(routes, np.arange(rows), experts)
    assert int(routes.max()) < experts
    ordered = np.sort(routes, axis=-1)
    assert not (ordered[..., 1:] == ordered[..., :-1]).any()
    for layer in range(4):
        loads = np.bincount(routes[:, layer].ravel(), minlength=experts)
        assert loads.max() - loads.min() <= 1


def test_one_row_per_token_and_the_last_one_is_not_valid() -> None:
    one, two = rollout(5, 1), rollout(3, 2)
    batch = build_batch([one.ref, two.ref], [one, two], SHAPE, [6, 3])
    assert batch.routes.shape == (9, 3, 2)
    assert batch.routes.dtype == np.uint8
    assert batch.cu_seqlens.tolist() == [0, 6, 9]
    assert batch.cu_seqlens.dtype == np.int32
    assert batch.valid.tolist() == [True] * 5 + [False] + [True] * 3
    assert np.array_equal(batch.routes[:5], one.routes)
    assert np.array_equal(batch.routes[6:], two.routes)
    assert len(set(batch.routes[5, 0].tolist())) == 2
    batch.routes[0, 0, 0] = 1  # writable
    assert batch.absent_fraction == 0.0


def test_per_router_is_by_global_layer_number() -> None:
    one = rollout(4)
    batch = build_batch([one.ref], [one], SHAPE)
    five, one_ = batch.per_router([5, 1])
    assert five.dtype == np.int64
    assert np.array_equal(five, one.routes[:, 2])
    assert np.array_equal(one_, one.routes[:, 0])
    assert len(batch.per_router()) == 3
    with pytest.raises(InvalidInput, match="layer 3 is not in the batch"):
        batch.per_router([3])


def test_only_some_layers() -> None:
    one = rollout(4)
    batch = build_batch([one.ref], [one], Shape((5,), 2, 16))
    assert np.array_equal(batch.routes[:, 0], one.routes[:, 2])
    with pytest.raises(InvalidInput, match="layers"):
        build_batch([one.ref], [one], Shape((9,), 2, 16))


def test_absent_rollouts_are_masked_and_counted() -> None:
    one, gone = rollout(6, 1), rollout(2, 2)
    batch = build_batch([one.ref, gone.ref], [one, RouteDeleted("removed")], SHAPE)
    assert batch.valid.tolist() == [True] * 6 + [False] * 2
    assert batch.absent_fraction == 0.25
    assert isinstance(batch.absent[1], RouteDeleted)
    assert int(batch.routes.max()) < 16
    assert build_batch([], [], SHAPE).absent_fraction == 0.0


def test_rollouts_of_two_models_do_not_mix() -> None:
    other = rollout(3, 2, ModelCard(num_experts=300, top_k=2, moe_layers=(1, 2, 5)))
    with pytest.raises(InvalidInput, match="300 experts"):
        build_batch([rollout(3).ref, other.ref], [rollout(3), other], SHAPE)


def test_tokens_are_held_against_the_ref() -> None:
    one, tokens = rollout(5), make_tokens(5)
    longer = np.append(tokens, 7)
    assert check_tokens([one.ref, one.ref], [tokens, longer]) == [5, 6]
    wrong = longer.copy()
    wrong[2] += 1
    for bad, why in (
        ([wrong], "not those"),
        ([tokens[:4]], "do not cover"),
        ([], "one per ref"),
        ([[tokens]], "shape"),
    ):
        with pytest.raises(InvalidInput, match=why):
            check_tokens([one.ref], bad)


def test_the_content_of_a_rollout_is_checked() -> None:
    assert check_rollout(rollout(3)).start == 0
    twice = make_routes(3).copy()
    twice[1, 1] = 4
    high = make_routes(3).copy()
    high[0, 0, 0] = 16
    for bad in (twice, high, make_routes(4), make_routes(3)[:, :2]):
        with pytest.raises(RouteCorrupt, match="run/r1#0"):
            check_rollout(rollout(3, routes=bad))
