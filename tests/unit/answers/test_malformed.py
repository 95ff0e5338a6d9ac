"""Malformed and hostile answers in vLLM's form: refused by the field, and nothing large is read."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest

from moebus.engine.vllm import decode_routes
from moebus.schemas.errors import InvalidInput
from tests.support.answers import CARD, bare, described, npy, routes_of, vllm, wide

WIDE = wide(routes_of())


def test_an_error_is_no_answer() -> None:
    for answer, why in (
        ({"error": {"message": "no such model"}}, "the answer is an error: 'no such model'"),
        ({"object": "error", "message": "bad"}, "the answer is an error: 'bad'"),
        ({}, "choices: missing"),
        ({"choices": []}, "choices: 0 choices"),
        ({"choices": [3]}, r"choices\[0\]: an object is needed"),
        ({"choices": {}}, "choices: an array is needed"),
        ([], "response: an object is needed"),
        ("{", "response: not JSON"),
        (b"\xff", "response: not JSON"),
        ("[" * 100_000, "response: not JSON"),
        (None, "response: an object is needed"),
    ):
        with pytest.raises(InvalidInput, match=why):
            decode_routes(answer, CARD)


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (7, "routes as text, object or array"), ("", "base64 of something else"), ("%%%", "not base64"),
        ("AAA", "not base64"), ("é", "not base64"), (bare(WIDE), "something else than a .npy"),
        (npy(WIDE)[:-8], "bytes where uint8"), (npy(WIDE.astype(float), None), "does not describe an array"),
        (npy(np.array([[[{}]]]), None), "does not describe an array of integers"),
        (npy(WIDE[0]), r"shape \[7, 2\]"), ([1, 2], "2 rows"), ([[1]] * 7, "1 layers"), ([0] * 7, "array is needed"),
        (WIDE.astype(float).tolist(), "float64"), ([[["a", "b"]] * 7] * 7, "integers"),
        ([[[1]] * 7] * 7, r"shape \[7, 7, 1\]"),
        ([[[1, 2]] * 7] * 6 + [[[1, 2]] * 3], "different shapes"), ([[[2**70, 1]] * 7] * 7, "integers"),
        ({}, "routed_experts.data: missing"), ({"data": 3}, "routed_experts.data: a string"),
        ({**described(WIDE), "dtype": "float32"}, "routed_experts.dtype: 'float32' is unknown"),
        ({**described(WIDE), "dtype": ["uint8"]}, "routed_experts.dtype"),
        ({**described(WIDE), "encoding": "zlib"}, "routed_experts.encoding"),
        ({**described(WIDE), "shape": [7, 7]}, "routed_experts.shape"),
        ({**described(WIDE), "shape": [7, -7, 2]}, "routed_experts.shape"),
        ({**described(WIDE), "shape": [7, 7, 2**40]}, "routed_experts.shape"),
        ({**described(WIDE), "shape": None}, "routed_experts.shape"),
        ({**described(WIDE), "shape": [7, 7, 3]}, "98 bytes where uint8"),
        ({**described(WIDE), "start": -1}, "routed_experts.start"), ({**described(WIDE), "start": "0"}, "start"),
    ],
)  # fmt: skip
def test_malformed_values_name_the_field(value: object, why: str) -> None:
    with pytest.raises(InvalidInput, match=why) as caught:
        decode_routes(vllm(value), CARD)
    assert caught.value.field.startswith("choices[0].routed_experts")


def test_a_text_longer_than_the_tokens_allow_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> bytes:
        raise AssertionError("decoded")

    monkeypatch.setattr(base64, "b64decode", never)
    for value in ("A" * 10_000, {"data": "A" * 10_000, "shape": [1, 1, 1]}):
        with pytest.raises(InvalidInput, match="10000 characters, but 7 or 8 rows"):
            decode_routes(vllm(value), CARD)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ("{'descr': '|O', 'fortran_order': False, 'shape': (7, 7, 2), }", "does not describe"),
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (7, 7, 9999999999), }", "shape"),
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (0, 0, 4294967296), }", "shape"),
        ("{'descr': '<u8', 'fortran_order': False, 'shape': (2147483647, 2147483647, 2147483647), }", "bytes where"),
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (" + "1, " * 30 + ")}", "shape"),
        ("{'descr': '|u1', 'fortran_order': 1, 'shape': (7, 7, 2), }", "does not describe"),
        ("__import__('os').abort()", "does not describe"),
        ("(" * 3000, "does not describe"),
        ("", "does not describe"),
    ],
)  # fmt: skip
def test_hostile_npy_headers(header: str, why: str) -> None:
    body = WIDE.astype("uint8").tobytes()
    for version, size in ((1, 2), (2, 4), (3, 4)):
        raw = b"\x93NUMPY" + bytes([version, 0]) + len(header).to_bytes(size, "little") + header.encode() + body
        with pytest.raises(InvalidInput, match=why):
            decode_routes(vllm(base64.b64encode(raw).decode()), CARD)


def test_torn_npy_files() -> None:
    whole = base64.b64decode(npy(WIDE))
    for cut in (0, 3, 6, 7, 8, 9, 10, 11, 12, 60, len(whole) - 1):
        with pytest.raises(InvalidInput):
            decode_routes(vllm(base64.b64encode(whole[:cut]).decode()), CARD)
    for raw in (whole[:6] + b"\x09\x00" + whole[8:], whole[:6] + b"\x02\x00\xff\xff\xff\xff" + whole[12:]):
        with pytest.raises(InvalidInput, match="npy"):
            decode_routes(vllm(base64.b64encode(raw).decode()), CARD)


@pytest.mark.parametrize("name", ["token_ids", "prompt_token_ids"])
@pytest.mark.parametrize("value", [3, ["a"], [[1]], [1.5], [-1], [2**64], [True, None], "abc", {}])
def test_malformed_token_ids(name: str, value: object) -> None:
    answer = vllm(npy(WIDE))
    answer["choices"][0][name] = value
    with pytest.raises(InvalidInput, match=rf"choices\[0\].{name}"):
        decode_routes(answer, CARD)


def test_malformed_counts() -> None:
    values: list[Any] = [-1, "5", 1.5, True, 2**40, []]
    for value in values:
        answer = vllm(npy(WIDE))
        answer["choices"][0]["prompt_token_ids"] = None
        answer["usage"]["prompt_tokens"] = value
        with pytest.raises(InvalidInput, match=r"usage\.prompt_tokens"):
            decode_routes(answer, CARD)
    for name, value in (("index", -1), ("index", 70_000), ("finish_reason", 3)):
        answer = vllm(npy(WIDE))
        answer["choices"][0][name] = value
        with pytest.raises(InvalidInput, match=rf"choices\[0\].{name}"):
            decode_routes(answer, CARD)
