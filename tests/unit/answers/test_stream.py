"""Streamed answers, put together: chunks in order, text cut anywhere, streams that break off."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moebus.engine import fastdeploy, sglang, vllm
from moebus.schemas.errors import InvalidInput
from tests.support.answers import CARD, OUTPUT, PROMPT, ROWS, bare, described, npy, routes_of, wide
from tests.support.answers import sglang as sglang_answer

ROUTES = routes_of()
WIDE = wide(ROUTES)
OTHER = routes_of(6, seed=9)


def generate_chunks() -> list[dict[str, Any]]:
    """Two choices of `/inference/v1/generate`, interleaved; routes on the chunk that ends each."""
    return [
        {"request_id": "g", "choices": [{"index": 0, "token_ids": OUTPUT[:1]}, {"index": 1, "token_ids": [31]}]},
        {"request_id": "g", "choices": [{"index": 0, "token_ids": OUTPUT[1:2], "routed_experts": None}]},
        {"request_id": "g", "choices": [
            {"index": 1, "token_ids": [32], "finish_reason": "length", "routed_experts": npy(wide(OTHER))}]},
        {"request_id": "g", "choices": [
            {"index": 0, "token_ids": OUTPUT[2:], "finish_reason": "stop", "routed_experts": npy(WIDE)}]},
        {"request_id": "g", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 5}},
    ]  # fmt: skip


def text_of(chunks: list[dict[str, Any]], end: str = "\n") -> str:
    lines = [f"data: {json.dumps(chunk)}{end}{end}" for chunk in chunks]
    return f": a comment{end}" + "".join(lines) + f"data: [DONE]{end}{end}data: not json{end}{end}"


def check_generate(stream: vllm.RouteStream) -> None:
    one, two = stream.decode()
    assert np.array_equal(one.routes, ROUTES)
    assert np.array_equal(two.routes, OTHER)
    assert (one.status, one.finish_reason, two.finish_reason) == ("complete", "stop", "length")
    assert one.token_ids is not None
    assert one.token_ids.tolist() == PROMPT + OUTPUT


def test_chunks_in_order() -> None:
    stream = vllm.RouteStream(CARD, prompt_token_ids=PROMPT)
    for chunk in generate_chunks():
        stream.feed(chunk)
    check_generate(stream)
    check_generate(stream)  # again: nothing was used up


@settings(max_examples=30, deadline=None)
@given(data=st.data(), end=st.sampled_from(["\n", "\r\n", "\r"]))
def test_text_cut_anywhere(data: st.DataObject, end: str) -> None:
    raw = text_of(generate_chunks(), end).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    stream = vllm.RouteStream(CARD, prompt_token_ids=PROMPT)
    for low, high in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        stream.feed_text(raw[low:high])
    assert stream.done
    check_generate(stream)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_data_of_several_lines_and_characters_cut_in_two(end: str) -> None:
    chunk = json.dumps({**generate_chunks()[0], "note": "é"}, ensure_ascii=False, indent=1)
    raw = "".join(f"data: {line}{end}" for line in chunk.split("\n")).encode() + end.encode()
    stream = vllm.RouteStream(CARD, prompt_token_ids=PROMPT)
    for place in range(len(raw)):
        stream.feed_text(raw[place : place + 1])
    assert [one.status for one in stream.decode()] == ["missing", "missing"]


def test_a_stream_that_breaks_off() -> None:
    chunks = generate_chunks()
    stream = vllm.RouteStream(CARD, prompt_token_ids=PROMPT)
    for chunk in chunks[:3]:
        stream.feed(chunk)
    one, two = stream.decode()
    assert (one.status, two.status) == ("missing", "complete")
    text = text_of(chunks[:4])
    stream = vllm.RouteStream(CARD, prompt_token_ids=PROMPT)
    stream.feed_text(text[: text.index("data: [DONE]") - 20])  # in the middle of the last event
    assert [one.status for one in stream.decode()] == ["missing", "complete"]
    stream = vllm.RouteStream(CARD, prompt_token_ids=PROMPT)
    stream.feed_text(text[: text.index("data: [DONE]") - 1])  # only its empty line is missing
    assert [one.status for one in stream.decode()] == ["complete", "complete"]


def test_decoding_in_between_loses_nothing() -> None:
    text = text_of(generate_chunks())
    stream = vllm.RouteStream(CARD, prompt_token_ids=PROMPT)
    middle = text.index("routed_experts") + 40
    stream.feed_text(text[:middle])
    assert [one.status for one in stream.decode()] == ["missing", "missing"]
    stream.feed_text(text[middle:])
    check_generate(stream)


def test_the_last_whole_wins() -> None:
    stream = vllm.RouteStream(CARD, prompt_token_ids=PROMPT)
    stream.feed({"choices": [{"token_ids": OUTPUT[:2], "routed_experts": npy(WIDE[:6])}]})
    assert stream.decode()[0].status == "partial"
    stream.feed({"choices": [{"token_ids": OUTPUT[2:], "routed_experts": npy(WIDE), "finish_reason": "stop"}]})
    assert np.array_equal(stream.decode()[0].routes, ROUTES)


def test_pieces_that_say_where_they_start_are_joined() -> None:
    def piece(low: int, high: int, tokens: list[int]) -> dict[str, Any]:
        nvext = {"routed_experts": described(WIDE[low:high], start=low), "completion_token_ids": tokens}
        return {"choices": [{"index": 0}], "nvext": nvext}

    stream = vllm.RouteStream(CARD, prompt_token_ids=PROMPT)
    for low, high, tokens in ((0, 5, OUTPUT[:1]), (5, 6, OUTPUT[1:2]), (6, 7, OUTPUT[2:])):
        stream.feed(piece(low, high, tokens))
    (one,) = stream.decode()
    assert np.array_equal(one.routes, ROUTES)
    stream.feed(piece(0, ROWS, []))  # the whole once more
    assert np.array_equal(stream.decode()[0].routes, ROUTES)
    for low, high in ((0, 3), (4, 7)):
        stream.feed(piece(low, high, []))
    with pytest.raises(InvalidInput, match=r"nvext\.routed_experts\.start: 4, but the rows before end at 3"):
        stream.decode()


@pytest.mark.parametrize("incremental", [True, False])
def test_sglang_sends_all_tokens_or_the_new_ones(incremental: bool) -> None:
    stream = sglang.RouteStream(CARD, prompt_token_ids=PROMPT)
    for upto in (1, 2, 3):
        tokens = OUTPUT[upto - 1 : upto] if incremental else OUTPUT[:upto]
        logprobs = [[-0.5, token, None] for token in tokens]
        value, finish = (bare(WIDE), "stop") if upto == 3 else (None, None)
        stream.feed(sglang_answer(value, output=tokens, finish=finish, completion_tokens=upto,
                                  output_token_logprobs=logprobs))  # fmt: skip
    (one,) = stream.decode()
    assert np.array_equal(one.routes, ROUTES)
    assert one.token_ids is not None
    assert one.token_ids.tolist() == PROMPT + OUTPUT
    assert (one.status, one.versions) == ("complete", ((0, "default"),))


def test_sglang_choices_and_lost_events() -> None:
    stream = sglang.RouteStream(CARD, prompt_token_ids=PROMPT)
    stream.feed({**sglang_answer(bare(wide(OTHER)), output=[7, 8]), "index": 1})
    stream.feed({**sglang_answer(bare(WIDE)), "index": 0})
    assert [one.rows for one in stream.decode()] == [ROWS, 6]
    with pytest.raises(InvalidInput, match="output_ids: 1 tokens after 3, but the event counts 5"):
        stream.feed(sglang_answer(None, output=[1], completion_tokens=5))


def test_sglang_openai() -> None:
    stream = sglang.RouteStream(CARD)
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    stream.feed({"choices": [{"index": 0, "delta": {"content": "x"}}]})
    stream.feed({"choices": [{"index": 0, "finish_reason": "stop"}], "sglext": {"routed_experts": bare(WIDE)}})
    stream.feed({"choices": [], "usage": usage})
    assert np.array_equal(stream.decode()[0].routes, ROUTES)


def test_fastdeploy_streams_no_routes() -> None:
    stream = fastdeploy.RouteStream(CARD)
    stream.feed({"choices": [{"index": 0, "delta": {"prompt_token_ids": PROMPT, "completion_token_ids": None}}]})
    for token in OUTPUT:
        stream.feed({"choices": [{"index": 0, "delta": {"completion_token_ids": [token]}}]})
    stream.feed({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    (one,) = stream.decode()
    assert (one.status, one.finish_reason) == ("missing", "stop")
    assert one.token_ids is not None
    assert one.token_ids.tolist() == PROMPT + OUTPUT
    stream.feed({"choices": [], "routed_experts": bare(ROUTES, "uint8")})  # should it ever
    assert np.array_equal(stream.decode()[0].routes, ROUTES)


def test_what_is_no_event() -> None:
    stream = vllm.RouteStream(CARD, max_event=100)
    with pytest.raises(InvalidInput, match="the stream had no choice"):
        stream.decode()
    for bad, why in (
        ("data: {\n\n", "not JSON"), ("data: []\n\n", "an object"), ('data: {"choices": 3}\n\n', "choices"),
        ('data: {"choices": [{"index": "a"}]}\n\n', r"choices\[0\]\.index"),
        ('data: {"choices": [{"token_ids": 4}]}\n\n', r"choices\[0\]\.token_ids"),
        ('data: {"error": {"message": "out of memory"}}\n\n', "broke the stream off.*out of memory"),
        ("data: " + "x" * 200, "longer than 100 characters"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput, match=why):
            vllm.RouteStream(CARD, max_event=100).feed_text(bad)
    stream = vllm.RouteStream(CARD, max_event=100)
    stream.feed_text("data: " + "x" * 60 + "\n")
    with pytest.raises(InvalidInput, match="longer than 100"):  # of several lines, too
        stream.feed_text("data: " + "x" * 60 + "\n")
