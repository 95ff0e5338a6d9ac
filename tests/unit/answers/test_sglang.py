"""Routes out of SGLang's answers: int32 without a shape."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from moebus.engine.sglang import decode_routes
from moebus.schemas.errors import InvalidInput
from moebus.schemas.layouts import to_sglang
from moebus.schemas.model_card import ModelCard
from tests.support.answers import CARD, DEPTH, OUTPUT, PROMPT, ROWS, bare, npy, routes_of, sglang, wide

ROUTES = routes_of()
WIDE = wide(ROUTES)


@pytest.mark.parametrize("array", [WIDE, ROUTES])
@pytest.mark.parametrize("dtype", [None, "int32", "uint16", "uint8"])
def test_all_layers_or_those_that_route_by_length(array: Any, dtype: str | None) -> None:
    more: dict[str, Any] = {} if dtype is None else {"routed_experts_dtype": dtype}
    (one,) = decode_routes(sglang(bare(array, dtype or "int32"), **more), CARD)
    assert np.array_equal(one.routes, ROUTES)
    assert one.routes.dtype == CARD.dtype
    assert (one.rows, one.status, one.prompt_rows, one.request_id) == (ROWS, "complete", 5, "r1")
    assert one.versions == ((0, "default"),)
    assert one.token_ids is None  # the prompt is not in the answer
    (one,) = decode_routes(json.dumps(sglang(bare(array, dtype or "int32"), **more)), CARD, prompt_token_ids=PROMPT)
    assert one.token_ids is not None
    assert one.token_ids.tolist() == PROMPT + OUTPUT


def test_our_own_export_is_read() -> None:
    (one,) = decode_routes(sglang(to_sglang(ROUTES, CARD.moe_layers, DEPTH)), CARD)
    assert np.array_equal(one.routes, ROUTES)


def test_the_row_of_a_stop_token_is_left_out() -> None:
    (one,) = decode_routes(sglang(bare(wide(routes_of(ROWS + 1)))), CARD)
    assert np.array_equal(one.routes, routes_of(ROWS + 1)[:ROWS])


def test_a_size_that_fits_two_shapes_is_refused_until_told() -> None:
    # 4 rows of 3 layers are as long as 3 rows of 4: prompt of 3 and one token, a stop's row or not.
    card = ModelCard(16, 2, (1, 2, 3), num_hidden_layers=4)
    routes = routes_of(3, card)
    answer = sglang(bare(wide(routes, card)), output=[1], prompt_tokens=3)
    with pytest.raises(
        InvalidInput, match=r"96 bytes without a shape can be int32 \[3, 4, 2\]; int32 \[4, 3, 2\]: say"
    ):
        decode_routes(answer, card)
    assert np.array_equal(decode_routes(answer, card, layers="all")[0].routes, routes)
    four = routes_of(4, card)
    answer = sglang(bare(four), output=[1], prompt_tokens=3)
    assert np.array_equal(decode_routes(answer, card, layers="moe")[0].routes, four[:3])


@pytest.mark.parametrize("cut", [1, 4, 7, 8, 56, 100])
def test_sizes_that_fit_nothing_are_refused(cut: int) -> None:
    text = bare(np.frombuffer(WIDE.astype("<i4").tobytes()[:-cut], np.uint8), "uint8")
    with pytest.raises(InvalidInput, match="do not fit 7 or 8 rows, 3 MoE layers or all 7, top-2"):
        decode_routes(sglang(text), CARD)


def test_another_model_s_routes_are_refused() -> None:
    for layers, top_k in ((6, 2), (7, 4), (4, 2)):
        array = np.zeros((ROWS, layers, top_k), np.int32)
        with pytest.raises(InvalidInput, match=r"meta_info\.routed_experts"):
            decode_routes(sglang(bare(array)), CARD)


def test_a_wrong_type_is_noticed() -> None:
    with pytest.raises(InvalidInput, match="do not fit"):
        decode_routes(sglang(bare(WIDE, "uint16")), CARD)
    for name in ("float32", 4, "int33"):
        with pytest.raises(InvalidInput, match=r"meta_info\.routed_experts_dtype"):
            decode_routes(sglang(bare(WIDE), routed_experts_dtype=name), CARD)


@pytest.mark.parametrize("start", [0, 2, 5, ROWS])
def test_a_start_offset(start: int) -> None:
    (one,) = decode_routes(sglang(bare(WIDE[start:])), CARD, start)
    assert np.array_equal(one.routes, ROUTES[start:])
    assert (one.start, one.rows) == (start, ROWS)
    assert one.versions == ((start, "default"),)
    (one,) = decode_routes(sglang(bare(WIDE[start:]), routed_experts_start_len=start), CARD)
    assert one.start == start


def test_a_forgotten_start_is_noticed() -> None:
    with pytest.raises(InvalidInput, match="do not fit"):
        decode_routes(sglang(bare(WIDE[3:])), CARD)


def test_zeros_of_a_prompt_that_was_computed_elsewhere() -> None:
    lost = WIDE.copy()
    lost[:4] = 0  # prefill / decode split without the transfer of routes
    (one,) = decode_routes(sglang(bare(lost)), CARD)
    assert one.first_recorded == 4


def test_several_choices_are_a_list() -> None:
    other = routes_of(5, seed=9)
    second = sglang(bare(wide(other)), output=[7])
    one, two = decode_routes([sglang(bare(WIDE)), second], CARD)
    assert (one.choice, two.choice) == (0, 1)
    assert np.array_equal(two.routes, other)
    assert two.path == "[1].meta_info.routed_experts"
    second["meta_info"]["routed_experts"] = "AAAA"
    with pytest.raises(InvalidInput, match=r"\[1\]\.meta_info\.routed_experts"):
        decode_routes([sglang(bare(WIDE)), second], CARD)
    second["meta_info"]["prompt_tokens"] = 6
    with pytest.raises(InvalidInput, match="different prompts"):
        decode_routes([sglang(bare(WIDE)), second], CARD)
    for bad in ([], [3]):
        with pytest.raises(InvalidInput):
            decode_routes(bad, CARD)


def test_token_ids_out_of_log_probabilities() -> None:
    answer = sglang(bare(WIDE), output_token_logprobs=[[-0.1, token, None] for token in OUTPUT])
    del answer["output_ids"]
    (one,) = decode_routes(answer, CARD, prompt_token_ids=PROMPT)
    assert one.token_ids is not None
    assert one.token_ids.tolist() == PROMPT + OUTPUT
    for bad in (3, [3], [[1]], [[1, "a"]]):
        answer["meta_info"]["output_token_logprobs"] = bad
        with pytest.raises(InvalidInput, match=r"meta_info\.output_token_logprobs"):
            decode_routes(answer, CARD)


def test_openai_paths() -> None:
    meta = sglang(bare(WIDE))["meta_info"]
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": len(OUTPUT)}
    answer: dict[str, Any] = {"id": "c1", "choices": [{"index": 0, "finish_reason": "stop", "meta_info": meta}]}
    (one,) = decode_routes(answer, CARD)
    assert np.array_equal(one.routes, ROUTES)
    assert (one.path, one.request_id) == ("choices[0].meta_info.routed_experts", "c1")
    answer = {
        "choices": [{"index": 0, "finish_reason": "length"}], "usage": usage,
        "sglext": {"routed_experts": bare(WIDE, "uint8"), "routed_experts_dtype": "uint8"},
        "metadata": {"weight_version": "step-4"},
    }  # fmt: skip
    (one,) = decode_routes(answer, CARD)
    assert np.array_equal(one.routes, ROUTES)
    assert (one.path, one.finish_reason, one.versions) == ("sglext.routed_experts", "length", ((0, "step-4"),))
    answer["choices"].append({"index": 1})
    with pytest.raises(InvalidInput, match=r"sglext\.routed_experts: one value for 2 choices"):
        decode_routes(answer, CARD)


def test_behind_dynamo() -> None:
    answer: dict[str, Any] = {
        "choices": [{"index": 0, "finish_reason": "stop"}], "usage": {"prompt_tokens": 5, "completion_tokens": 3},
        "nvext": {"routed_experts": bare(WIDE), "completion_token_ids": OUTPUT},
    }  # fmt: skip
    (one,) = decode_routes(answer, CARD, prompt_token_ids=PROMPT)
    assert np.array_equal(one.routes, ROUTES)
    assert one.path == "nvext.routed_experts"
    assert one.token_ids is not None
    assert one.token_ids.tolist() == PROMPT + OUTPUT
    answer["choices"].append({"index": 1})
    with pytest.raises(InvalidInput, match=r"nvext\.routed_experts: one value for 2 choices"):
        decode_routes(answer, CARD)


@pytest.mark.parametrize("absent", [True, False])
def test_aborted_in_the_queue_and_absent(absent: bool) -> None:
    answer = sglang(None, output=[], finish="abort")
    if not absent:
        answer["meta_info"]["routed_experts"] = None
    (one,) = decode_routes(answer, CARD)
    assert (one.status, one.finish_reason, one.rows) == ("aborted", "abort", 0)
    nothings: list[object] = [None, "", []]
    for nothing in nothings:
        (one,) = decode_routes(sglang(nothing), CARD)
        assert (one.status, one.rows) == ("missing", 0)
    (one,) = decode_routes(sglang(bare(WIDE[:4]), output=[], finish="abort"), CARD)
    assert (one.status, one.rows) == ("aborted", 4)
    (one,) = decode_routes(sglang(bare(WIDE[:0]), output=[], finish="abort", prompt_tokens=1), CARD)
    assert (one.status, one.rows) == ("aborted", 0)


def test_not_finished_is_partial() -> None:
    (one,) = decode_routes(sglang(bare(WIDE), finish=None), CARD)
    assert (one.status, one.finish_reason) == ("partial", "")


def test_a_tensor_that_nobody_encoded() -> None:
    with pytest.raises(InvalidInput, match=r"meta_info\.routed_experts: an empty object: .*--skip-tokenizer-init"):
        decode_routes(sglang({}), CARD)
    answer = {"choices": [{"index": 0}], "sglext": {"routed_experts": {}}}
    with pytest.raises(InvalidInput, match=r"sglext\.routed_experts: an empty object"):
        decode_routes(answer, CARD)


def test_a_npy_text_is_taken_too() -> None:
    assert np.array_equal(decode_routes(sglang(npy(WIDE)), CARD)[0].routes, ROUTES)


@pytest.mark.parametrize("value", [3, [], "x", True])
def test_a_malformed_meta_info(value: object) -> None:
    with pytest.raises(InvalidInput, match="meta_info"):
        decode_routes({"meta_info": value}, CARD)
