"""Routes out of vLLM's answers, and out of Dynamo's."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from moebus.engine.vllm import decode_routes
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from tests.support.answers import CARD, DEPTH, OUTPUT, PROMPT, ROWS, bare, described, npy, routes_of, vllm, wide

ROUTES = routes_of()
WIDE = wide(ROUTES)


@pytest.mark.parametrize(
    "value",
    [
        npy(WIDE),
        npy(WIDE, "uint16"),
        npy(WIDE, "int32"),
        npy(WIDE, ">i4"),
        npy(ROUTES),  # MoE layers only
        npy(np.asfortranarray(WIDE.astype("uint8")), None),
        described(WIDE),
        described(WIDE, "int16", None),
        {"data": bare(WIDE, "uint8"), "shape": list(WIDE.shape), "start": 0},  # without a type
        {**described(WIDE), "encoding": "base64"},
        WIDE.tolist(),
        ROUTES.tolist(),
    ],
)
def test_every_form_of_the_field(value: object) -> None:
    (one,) = decode_routes(vllm(value), CARD)
    assert np.array_equal(one.routes, ROUTES)
    assert one.routes.dtype == CARD.dtype
    assert one.valid.all()
    assert (one.choice, one.start, one.rows, one.status, one.finish_reason) == (0, 0, ROWS, "complete", "stop")
    assert (one.prompt_rows, one.path, one.request_id) == (5, "choices[0].routed_experts", "cmpl-1")
    assert one.token_ids is not None
    assert one.token_ids.tolist() == PROMPT + OUTPUT
    assert one.versions == ()


def test_json_text_is_an_answer_too() -> None:
    text = json.dumps(vllm(npy(WIDE)))
    for form in (text, text.encode()):
        assert np.array_equal(decode_routes(form, CARD)[0].routes, ROUTES)


def test_the_row_of_a_stop_token_is_left_out() -> None:
    longer = wide(routes_of(ROWS + 1))
    (one,) = decode_routes(vllm(npy(longer)), CARD)
    assert np.array_equal(one.routes, routes_of(ROWS + 1)[:ROWS])


@pytest.mark.parametrize("rows", [0, 1, ROWS - 1, ROWS + 2])
def test_other_numbers_of_rows_are_refused(rows: int) -> None:
    for value in (npy(wide(routes_of(rows))), described(wide(routes_of(rows))), wide(routes_of(rows)).tolist()):
        with pytest.raises(InvalidInput, match=r"choices\[0\].routed_experts: .*7 or 8 rows"):
            decode_routes(vllm(value), CARD)


def test_prompt_and_output_apart() -> None:
    before, after = wide(ROUTES)[: len(PROMPT)], wide(ROUTES)[len(PROMPT) :]
    for rest in (after, np.concatenate([after, after[-1:]])):  # with and without the row of the last token
        (one,) = decode_routes(vllm(rest.tolist(), prompt_routed_experts=before.tolist()), CARD)
        assert np.array_equal(one.routes, ROUTES)
    (one,) = decode_routes(vllm(None, output=[21], prompt_routed_experts=npy(before)), CARD)
    assert np.array_equal(one.routes, ROUTES[:5])
    with pytest.raises(InvalidInput, match="missing, but 3 tokens"):
        decode_routes(vllm(None, prompt_routed_experts=npy(before)), CARD)
    with pytest.raises(InvalidInput, match="7 layers, but 3 in prompt_routed_experts"):
        decode_routes(vllm(npy(after), prompt_routed_experts=npy(ROUTES[:5])), CARD)
    with pytest.raises(InvalidInput, match="prompt_routed_experts"):
        decode_routes(vllm(npy(after), prompt_routed_experts=npy(before[1:])), CARD)


def test_only_the_output_s_rows_are_not_the_whole() -> None:
    with pytest.raises(InvalidInput, match="7 or 8 rows"):
        decode_routes(vllm(npy(WIDE[len(PROMPT) :])), CARD)


@pytest.mark.parametrize("start", [1, 4, 5, 6, ROWS])
def test_a_start_offset(start: int) -> None:
    (one,) = decode_routes(vllm(npy(WIDE[start:])), CARD, start)
    assert np.array_equal(one.routes, ROUTES[start:])
    assert (one.start, one.rows) == (start, ROWS)
    (one,) = decode_routes(vllm(described(WIDE[start:], start=start)), CARD)  # the object says it itself
    assert (one.start, one.rows) == (start, ROWS)
    before, after = WIDE[start : len(PROMPT)], WIDE[len(PROMPT) :]
    apart = vllm(npy(after), prompt_routed_experts=npy(before))
    if start <= len(PROMPT):
        assert np.array_equal(decode_routes(apart, CARD, start)[0].routes, ROUTES[start:])
    else:
        with pytest.raises(InvalidInput, match=f"start: {start} is behind the 5 tokens of the prompt"):
            decode_routes(apart, CARD, start)


def test_a_start_that_cannot_be() -> None:
    with pytest.raises(InvalidInput, match="start: 2, but the rows of the answer begin at 3"):
        decode_routes(vllm(described(WIDE[3:], start=3)), CARD, 2)
    with pytest.raises(InvalidInput, match="start: 8, but 5 prompt and 3 output tokens have 7 rows"):
        decode_routes(vllm(npy(WIDE[:0])), CARD, ROWS + 1)
    for bad in (-1, True, "3"):
        with pytest.raises(InvalidInput, match="start"):
            decode_routes(vllm(npy(WIDE)), CARD, bad)  # type: ignore[arg-type]


def test_cached_rows_are_not_recorded() -> None:
    cached = wide(ROUTES).astype(np.int32)
    cached[:3] = -1
    (one,) = decode_routes(vllm(npy(cached, "int32")), CARD)
    assert one.valid.tolist() == [False] * 3 + [True] * 4
    assert (one.start, one.first_recorded) == (0, 3)
    assert np.array_equal(one.routes[3:], ROUTES[3:])
    zeros = wide(ROUTES).copy()
    zeros[:2] = 0  # what a server leaves where it never wrote
    assert decode_routes(vllm(npy(zeros)), CARD)[0].first_recorded == 2
    fill = wide(ROUTES).copy()
    fill[:2] = 255  # all ones: no expert has that id
    assert decode_routes(vllm(npy(fill)), CARD)[0].first_recorded == 2
    zeros[5] = 0
    hole = decode_routes(vllm(npy(zeros)), CARD)[0]
    with pytest.raises(InvalidInput, match="row 5 was not recorded"):
        _ = hole.first_recorded


def test_255_is_an_expert_where_there_are_256() -> None:
    card = ModelCard(256, 2, (0, 1), num_hidden_layers=2)
    routes = routes_of(ROWS, card)
    routes[0] = [[255, 1], [3, 255]]
    assert np.array_equal(decode_routes(vllm(npy(routes)), card)[0].routes, routes)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda a: a.__setitem__((2, 3), 4), "layer 3 does not route by the model card"),
        (lambda a: a.__setitem__((slice(None), 2), 0), "layer 2 routes by the model card, but all its ids are 0"),
        (lambda a: a.__setitem__((4, 5, 0), 16), "row 4, layer 5: expert id 16"),
        (lambda a: a.__setitem__((4, 5), 3), r"row 4, layer 5: expert 3 is twice in the top-2"),
        (lambda a: a.__setitem__((4, 1), -1), "row 4 is recorded, but not in layer 1"),
        (lambda a: a.__setitem__((4, 1, 0), -1), "row 4 is recorded, but not in layer 1|row 4, layer 1: expert id -1"),
        (lambda a: a.__setitem__((4, 1, 0), -7), "row 4, layer 1: expert id -7"),
        (lambda a: a.__setitem__(slice(None), -1), "none of the 7 rows was recorded"),
        (lambda a: a.__setitem__(slice(None), 0), "none of the 7 rows was recorded"),
    ],
)
def test_what_no_router_chose_is_refused(change: Any, why: str) -> None:
    array = wide(ROUTES).astype(np.int32)
    change(array)
    for value in (npy(array, "int32"), described(array, "int32"), array.tolist()):
        with pytest.raises(InvalidInput, match=why) as caught:
            decode_routes(vllm(value), CARD)
        assert caught.value.field == "choices[0].routed_experts"


def test_layers_shifted_by_one_are_noticed() -> None:
    shifted = np.roll(WIDE, 1, axis=1)
    with pytest.raises(InvalidInput, match="layer 3 does not route"):
        decode_routes(vllm(npy(shifted)), CARD)


def test_a_constant_dense_layer_may_have_any_value() -> None:
    filled = WIDE.astype(np.int32)
    filled[:, [0, 3, 4, 6]] = -1
    assert np.array_equal(decode_routes(vllm(npy(filled, "int32")), CARD)[0].routes, ROUTES)


def test_a_top_one_layer_of_zeros() -> None:
    card = ModelCard(16, 1, (0, 1), num_hidden_layers=2)
    few, many = routes_of(7, card), routes_of(20, card)
    few[:, 1], many[:, 1] = 0, 0
    assert np.array_equal(decode_routes(vllm(npy(few)), card)[0].routes, few)  # 7 tokens may all go to expert 0
    answer = vllm(npy(many), output=list(range(16)))
    with pytest.raises(InvalidInput, match="layer 1 routes"):
        decode_routes(answer, card)


def test_without_the_depth_any_that_has_the_layers_is_taken() -> None:
    card = ModelCard(16, 2, CARD.moe_layers)
    assert np.array_equal(decode_routes(vllm(npy(WIDE)), card)[0].routes, ROUTES)
    with pytest.raises(InvalidInput, match=r"shape \[7, 5, 2\]"):
        decode_routes(vllm(npy(WIDE[:, :5])), card)
    with pytest.raises(InvalidInput, match=r"shape \[7, 8, 2\] where there are .* or all 7"):
        decode_routes(vllm(npy(np.repeat(WIDE[:, :1], DEPTH + 1, axis=1))), CARD)


def test_several_choices() -> None:
    other = routes_of(6, seed=9)
    answer = vllm(npy(WIDE))
    second = {
        "index": 1, "finish_reason": "length", "token_ids": [31, 32], "prompt_token_ids": PROMPT,
        "routed_experts": npy(wide(other)),
    }  # fmt: skip
    answer["choices"].append(second)
    answer["usage"]["completion_tokens"] = 5
    one, two = decode_routes(answer, CARD)
    assert (one.choice, two.choice) == (0, 1)
    assert np.array_equal(two.routes, other)
    assert two.finish_reason == "length"
    second["routed_experts"] = npy(wide(routes_of(9)))
    with pytest.raises(InvalidInput, match=r"choices\[1\].routed_experts"):
        decode_routes(answer, CARD)
    second.update(routed_experts=npy(wide(other)), prompt_token_ids=[1, 2, 3, 4, 5])
    with pytest.raises(InvalidInput, match="different prompts"):
        decode_routes(answer, CARD)
    second.update(prompt_token_ids=PROMPT, index=0)
    with pytest.raises(InvalidInput, match="two choices with one index"):
        decode_routes(answer, CARD)


def test_chat_and_generate() -> None:
    chat = vllm(npy(WIDE), prompt_token_ids=PROMPT)
    chat["choices"][0].pop("prompt_token_ids")
    chat["choices"][0]["message"] = {"role": "assistant", "content": "x"}
    assert decode_routes(chat, CARD)[0].token_ids is not None
    generate = {"request_id": "g1", "choices": [{"index": 0, "token_ids": OUTPUT, "routed_experts": npy(WIDE)}]}
    with pytest.raises(InvalidInput, match="does not say how many prompt tokens"):
        decode_routes(generate, CARD)
    (one,) = decode_routes(generate, CARD, prompt_token_ids=PROMPT)
    assert (one.request_id, one.rows, one.status) == ("g1", ROWS, "partial")  # no finish reason: not known to be whole
    with pytest.raises(InvalidInput, match="prompt_token_ids"):
        decode_routes(vllm(npy(WIDE)), CARD, prompt_token_ids=[1, *PROMPT[1:]])


def test_without_token_ids_the_counts_do() -> None:
    answer = vllm(npy(WIDE))
    answer["choices"][0].update(token_ids=None, prompt_token_ids=None)
    (one,) = decode_routes(answer, CARD)
    assert (one.rows, one.prompt_rows, one.token_ids) == (ROWS, 5, None)
    answer["choices"][0]["token_ids"] = [1]
    with pytest.raises(InvalidInput, match="1 output token ids where the answer counts 3"):
        decode_routes(answer, CARD)


def test_dynamo() -> None:
    nvext = {"routed_experts": described(WIDE[2:], start=2), "completion_token_ids": OUTPUT}
    answer = vllm(None, nvext=nvext)
    answer["choices"][0]["token_ids"] = None
    (one,) = decode_routes(answer, CARD)
    assert (one.start, one.rows, one.path) == (2, ROWS, "nvext.routed_experts")
    assert np.array_equal(one.routes, ROUTES[2:])
    answer["choices"].append({"index": 1})
    with pytest.raises(InvalidInput, match=r"nvext.routed_experts: one value for 2 choices"):
        decode_routes(answer, CARD)


@pytest.mark.parametrize(
    ("finish", "output", "status"),
    [
        ("stop", OUTPUT, "missing"), ("length", OUTPUT, "missing"), ("abort", OUTPUT, "missing"),
        ("abort", [], "aborted"), (None, OUTPUT, "missing"),
    ],
)  # fmt: skip
def test_no_routes_in_the_answer(finish: str, output: list[int], status: str) -> None:
    for absent in (False, True):
        answer = vllm(None, output=output, finish=finish)
        if absent:
            del answer["choices"][0]["routed_experts"]
        (one,) = decode_routes(answer, CARD)
        assert (one.status, one.rows, one.routes.shape) == (status, 0, (0, 3, 2))


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        ("stop", "complete"), ("length", "complete"), ("tool_calls", "complete"), ("abort", "aborted"),
        ("error", "aborted"), (None, "partial"), ("", "partial"), ("paused_for_update", "partial"),
    ],
)  # fmt: skip
def test_the_status_is_by_the_finish_reason(finish: str | None, status: str) -> None:
    (one,) = decode_routes(vllm(npy(WIDE), finish=finish), CARD)
    assert (one.status, one.finish_reason) == (status, finish or "")


@pytest.mark.parametrize("rows", [5, 4])
def test_aborted_with_no_token(rows: int) -> None:
    (one,) = decode_routes(vllm(npy(WIDE[:rows]), output=[], finish="abort"), CARD)
    assert np.array_equal(one.routes, ROUTES[:rows])
    assert (one.status, one.rows, one.prompt_rows) == ("aborted", rows, 5)
    half = WIDE[:rows].copy()
    half[2:] = 0  # the rest of the prompt was never computed
    (one,) = decode_routes(vllm(npy(half), output=[], finish="abort"), CARD)
    assert np.array_equal(one.routes, ROUTES[:2])
    (one,) = decode_routes(vllm(npy(half * 0), output=[], finish="abort"), CARD)
    assert (one.rows, one.status) == (0, "aborted")
