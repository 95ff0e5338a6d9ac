"""Answers from anywhere: nothing but InvalidInput is raised, and no array is taken but the one that was sent."""

from __future__ import annotations

import base64
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moebus.engine import fastdeploy, sglang, vllm
from moebus.engine.answers.decoded import DecodedRoutes
from moebus.schemas.errors import InvalidInput
from moebus.schemas.model_card import ModelCard
from moebus.schemas.record import check_ids
from tests.support.answers import CARD, bare, described, npy, routes_of, wide
from tests.support.answers import fastdeploy as fastdeploy_answer
from tests.support.answers import sglang as sglang_answer
from tests.support.answers import vllm as vllm_answer

Decode = Callable[..., list[DecodedRoutes]]
DECODERS: tuple[Decode, ...] = (vllm.decode_routes, sglang.decode_routes, fastdeploy.decode_routes)
WIDE = wide(routes_of())

NAMES = [
    "choices", "meta_info", "routed_experts", "prompt_routed_experts", "usage", "prompt_tokens", "start", "data",
    "completion_tokens", "end", "id", "token_ids", "output_ids", "index", "finish_reason", "type", "shape", "dtype",
    "nvext", "sglext", "message", "weight_versions", "weight_version", "version", "output_token_logprobs", "error",
    "routed_experts_dtype", "routed_experts_start_len", "prompt_token_ids", "completion_token_ids",
]  # fmt: skip

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
    | st.sampled_from([npy(WIDE), bare(WIDE), bare(WIDE, "uint8"), "AAAA", "stop", "abort"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(NAMES), inner, max_size=6,
    ),
    max_leaves=30,
)  # fmt: skip


def attempt(
    decode: Decode, answer: object, card: ModelCard, start: int
) -> tuple[list[DecodedRoutes], InvalidInput | None]:
    """What is decoded, or why it is refused."""
    try:
        return decode(answer, card, start), None
    except InvalidInput as error:
        return [], error


def harmless(decode: Decode, answer: object, card: ModelCard = CARD, start: int = 0) -> list[DecodedRoutes]:
    """What is decoded, checked; [] where it is refused."""
    found, refused = attempt(decode, answer, card, start)
    assert refused is None or refused.field
    for one in found:
        assert one.routes.shape[1:] == card.shape(0)[1:]
        assert one.routes.dtype == card.dtype
        assert len(one.valid) == len(one.routes)
        check_ids(one.routes[one.valid], card.num_experts)
        assert all(row >= one.start for row, _ in one.versions)
    return found


@settings(max_examples=120, deadline=None)
@given(answer=json_values, start=st.integers(-1, 9))
def test_any_json(answer: object, start: int) -> None:
    for decode in DECODERS:
        harmless(decode, answer, start=start)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_one_field_replaced(data: st.DataObject) -> None:
    """A good answer, one of its fields anything."""
    answers: list[tuple[Decode, Any]] = [
        (vllm.decode_routes, vllm_answer(npy(WIDE))),
        (vllm.decode_routes, vllm_answer(described(WIDE))),
        (sglang.decode_routes, sglang_answer(bare(WIDE), weight_versions=[{"version": "a", "start": 0, "end": 3}])),
        (fastdeploy.decode_routes, fastdeploy_answer(bare(routes_of(), "uint8"))),
    ]
    decode, answer = copy.deepcopy(data.draw(st.sampled_from(answers)))
    holder: Any = answer
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(holder[key], (dict, list)) or not holder[key] or data.draw(st.booleans()):
            break
        holder = holder[key]
    holder[key] = data.draw(json_values)
    harmless(decode, answer)


@settings(max_examples=80, deadline=None)
@given(raw=st.binary(max_size=400), magic=st.booleans(), cut=st.integers(0, 300))
def test_any_bytes(raw: bytes, magic: bool, cut: int) -> None:
    good = base64.b64decode(npy(WIDE))
    for payload in (b"\x93NUMPY" * magic + raw, good[:cut] + raw, raw + good[cut:]):
        text = base64.b64encode(payload).decode()
        harmless(vllm.decode_routes, vllm_answer(text))
        harmless(sglang.decode_routes, sglang_answer(text))
        harmless(fastdeploy.decode_routes, fastdeploy_answer(text))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_is_taken_is_what_was_sent(data: st.DataObject) -> None:
    """Any model, any number of tokens, any form: the routes come out as they went in, or they are refused."""
    depth = data.draw(st.integers(1, 6))
    layers = sorted(data.draw(st.sets(st.integers(0, depth - 1), min_size=1)))
    experts = data.draw(st.sampled_from([2, 16, 255, 256, 257, 400]))
    card = ModelCard(experts, data.draw(st.integers(1, 2)), tuple(layers), num_hidden_layers=depth)
    prompt, output, stop = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6)), data.draw(st.booleans())
    rows = prompt + output - 1
    start = data.draw(st.integers(0, rows))
    routes = routes_of(rows + stop, card, seed=data.draw(st.integers(0, 99)))
    whole = (wide(routes, card) if data.draw(st.booleans()) else routes)[start:]
    size = data.draw(
        st.sampled_from([name for name in ("uint8", "uint16", "int32") if np.iinfo(name).max + 1 >= experts])
    )
    usage = {"prompt_tokens": prompt, "completion_tokens": output}
    by_vllm = {"choices": [{"finish_reason": "stop", "routed_experts": npy(whole, size)}], "usage": usage}
    by_object = {"choices": [{"routed_experts": described(whole, size, start)}], "usage": usage}
    by_sglang = {"meta_info": {**usage, "routed_experts": bare(whole, size), "routed_experts_dtype": size}}
    for decode, answer in ((DECODERS[0], by_vllm), (DECODERS[0], by_object), (DECODERS[1], by_sglang)):
        found, refused = attempt(decode, answer, card, start)
        if refused is not None:  # only for a size without a shape that fits two, and top-1 routes that look like none
            assert "without a shape can be" in refused.reason or "all its ids are 0" in refused.reason, refused
            continue
        (one,) = found
        assert one.rows == rows
        assert np.array_equal(one.routes[one.valid], routes[start:rows][one.valid])
        assert one.valid.all()
