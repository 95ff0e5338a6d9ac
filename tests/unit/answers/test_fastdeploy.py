"""Routes out of FastDeploy's answers, and its request ids."""

from __future__ import annotations

import numpy as np
import pytest

from moebus.engine.fastdeploy import decode_routes
from moebus.engine.fastdeploy.routes import rollout_id_of
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from tests.support.answers import CARD, OUTPUT, PROMPT, ROWS, bare, described, fastdeploy, routes_of

ROUTES = routes_of()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int64"])
def test_the_type_follows_from_the_size(dtype: str) -> None:
    (one,) = decode_routes(fastdeploy(bare(ROUTES, dtype)), CARD)
    assert np.array_equal(one.routes, ROUTES)
    assert (one.rows, one.status, one.path) == (ROWS, "complete", "routed_experts")
    assert one.token_ids is not None
    assert one.token_ids.tolist() == PROMPT + OUTPUT


@pytest.mark.parametrize(
    ("experts", "dtype", "good"), [(300, "uint16", True), (300, "uint8", False), (300, "uint32", True)]
)
def test_types_too_small_for_the_experts_are_none(experts: int, dtype: str, good: bool) -> None:
    card = ModelCard(experts, 2, (1, 2, 5))
    routes = routes_of(ROWS, card) % 250
    answer = fastdeploy(bare(routes, dtype))
    if good:
        assert np.array_equal(decode_routes(answer, card)[0].routes, routes)
    else:
        with pytest.raises(InvalidInput, match="do not fit"):
            decode_routes(answer, card)


def test_a_row_that_was_never_captured_behind_the_last_token() -> None:
    longer = np.concatenate([ROUTES, np.full((1, 3, 2), 255, np.uint8)])
    assert np.array_equal(decode_routes(fastdeploy(bare(longer, "uint8")), CARD)[0].routes, ROUTES)


def test_fill_is_not_recorded() -> None:
    filled = ROUTES.copy()
    filled[:2] = 255
    (one,) = decode_routes(fastdeploy(bare(filled, "uint8")), CARD)
    assert one.first_recorded == 2
    filled[4] = 255
    with pytest.raises(InvalidInput, match="row 4 was not recorded"):
        _ = decode_routes(fastdeploy(bare(filled, "uint8")), CARD)[0].first_recorded
    filled[4] = ROUTES[4]
    filled[3, 1] = 255
    with pytest.raises(InvalidInput, match="row 3 is recorded, but not in layer 2"):
        decode_routes(fastdeploy(bare(filled, "uint8")), CARD)


def test_an_object_and_the_choice_s_own_field() -> None:
    answer = fastdeploy(described(ROUTES, "uint16"))
    assert np.array_equal(decode_routes(answer, CARD)[0].routes, ROUTES)
    answer = fastdeploy(None)
    answer["choices"][0]["routed_experts"] = bare(ROUTES, "uint8")
    assert decode_routes(answer, CARD)[0].path == "choices[0].routed_experts"
    answer = fastdeploy(None)
    answer["choices"][0]["message"]["routed_experts"] = bare(ROUTES, "uint8")
    assert decode_routes(answer, CARD)[0].path == "choices[0].message.routed_experts"


def test_one_value_for_several_choices_is_nobody_s() -> None:
    answer = fastdeploy(bare(ROUTES, "uint8"))
    answer["choices"].append({"index": 1, "message": {"completion_token_ids": OUTPUT}})
    with pytest.raises(InvalidInput, match="routed_experts: one value for 2 choices"):
        decode_routes(answer, CARD)


@pytest.mark.parametrize(
    ("finish", "status"), [("stop", "complete"), ("length", "complete"), ("recover_stop", "aborted"), (None, "partial")]
)
def test_finish_reasons(finish: str | None, status: str) -> None:
    assert decode_routes(fastdeploy(bare(ROUTES, "uint8"), finish=finish), CARD)[0].status == status


def test_absent_is_missing() -> None:
    assert decode_routes(fastdeploy(None), CARD)[0].status == "missing"


@pytest.mark.parametrize("cut", [1, 2, 6, 20])
def test_sizes_that_fit_nothing(cut: int) -> None:
    with pytest.raises(InvalidInput, match="do not fit 7 or 8 rows"):
        decode_routes(fastdeploy(bare(ROUTES.reshape(-1)[:-cut], "uint8")), CARD)


@pytest.mark.parametrize(
    ("request_id", "rollout"),
    [
        ("chatcmpl-data-7:2:1:0-d9f16c5c-65f6-4815-b44d-14e2c581907c", "data-7:2:1:0"),
        ("chatcmpl-data-7:2:1:0-d9f16c5c-65f6-4815-b44d-14e2c581907c_0", "data-7:2:1:0"),
        ("chatcmpl-a_b-d9f16c5c-65f6-4815-b44d-14e2c581907c", "a_b"),
    ],
)
def test_the_rollout_id_of_a_request_id(request_id: str, rollout: str) -> None:
    assert rollout_id_of({**fastdeploy(None), "id": request_id}) == rollout


@pytest.mark.parametrize(
    "request_id", [None, "", "chatcmpl-d9f16c5c-65f6-4815-b44d-14e2c581907c", "cmpl-x", "chatcmpl-a:1:2:3", 3]
)
def test_ids_without_a_rollout_are_refused(request_id: object) -> None:
    with pytest.raises(InvalidInput):
        rollout_id_of({"id": request_id})
