"""Weight versions of output tokens as weight versions of rows: token i was sampled by row P - 1 + i."""

from __future__ import annotations

from typing import Any

import pytest

from moebus.engine.answers.versions import Span, read_spans, row_spans
from moebus.engine.sglang import decode_routes
from moebus.engine.vllm import decode_routes as decode_vllm
from moebus.schemas.errors import InvalidInput
from tests.support.answers import CARD, ROWS, bare, npy, routes_of, sglang, vllm, wide

WIDE = wide(routes_of())


@pytest.mark.parametrize(
    ("name", "spans", "prompt", "output", "start", "rows"),
    [
        ("no spans", [], 5, 3, 0, ()),
        ("one version", [("a", 0, 3)], 5, 3, 0, ((0, "a"),)),
        ("switch in the middle: token 2 by row 6", [("a", 0, 2), ("b", 2, 3)], 5, 3, 0, ((0, "a"), (6, "b"))),
        ("switch after the first token: token 1 by row 5", [("a", 0, 1), ("b", 1, 3)], 5, 3, 0, ((0, "a"), (5, "b"))),
        ("switch at the first token: all of it is new", [("b", 0, 3)], 5, 3, 0, ((0, "b"),)),
        ("two switches", [("a", 0, 1), ("b", 1, 2), ("c", 2, 4)], 2, 4, 0, ((0, "a"), (2, "b"), (3, "c"))),
        ("the same version again is one span", [("a", 0, 1), ("a", 1, 3)], 5, 3, 0, ((0, "a"),)),
        ("back to an old one", [("a", 0, 1), ("b", 1, 2), ("a", 2, 3)], 5, 3, 0, ((0, "a"), (5, "b"), (6, "a"))),
        ("zero outputs", [], 5, 0, 0, ()),
        ("prompt of one token: token 1 by row 1", [("a", 0, 1), ("b", 1, 2)], 1, 2, 0, ((0, "a"), (1, "b"))),
        ("start in the prompt", [("a", 0, 1), ("b", 1, 3)], 5, 3, 2, ((2, "a"), (5, "b"))),
        ("start at the end of the prompt", [("a", 0, 1), ("b", 1, 3)], 5, 3, 4, ((4, "a"), (5, "b"))),
        ("start behind the first span", [("a", 0, 1), ("b", 1, 3)], 5, 3, 5, ((5, "b"),)),
        ("start behind all but the last", [("a", 0, 1), ("b", 1, 2), ("c", 2, 3)], 5, 3, 6, ((6, "c"),)),
        ("continuation of a partial one: its prompt has the old output", [("b", 0, 4)], 8, 4, 7, ((7, "b"),)),
        ("continuation with a switch: token 1 by row 8", [("b", 0, 1), ("c", 1, 4)], 8, 4, 7, ((7, "b"), (8, "c"))),
    ],
)  # fmt: skip
def test_rows(
    name: str,
    spans: list[tuple[str, int, int]],
    prompt: int,
    output: int,
    start: int,
    rows: tuple[tuple[int, str], ...],
) -> None:
    assert row_spans([Span(*span) for span in spans], prompt, output, start) == rows, name


def dicts(*spans: tuple[object, object, object]) -> list[dict[str, object]]:
    return [{"version": version, "start": start, "end": end} for version, start, end in spans]


def test_in_an_answer() -> None:
    spans = dicts(("7", 0, 1), ("8", 1, 1), (9, 1, 3))
    (one,) = decode_routes(sglang(bare(WIDE), weight_versions=spans, weight_version="9"), CARD)
    assert one.versions == ((0, "7"), (5, "9"))
    longer = wide(routes_of(ROWS + 1))  # the row of a stop token changes nothing
    (one,) = decode_routes(sglang(bare(longer), weight_versions=spans), CARD)
    assert one.versions == ((0, "7"), (5, "9"))
    (one,) = decode_routes(sglang(bare(WIDE[4:]), weight_versions=spans), CARD, 4)
    assert one.versions == ((4, "7"), (5, "9"))
    (one,) = decode_routes(sglang(bare(WIDE[:5]), output=[], finish="abort", weight_versions=[]), CARD)
    assert one.versions == ((0, "default"),)
    answer = vllm(npy(WIDE), weight_version="step-3")
    assert decode_vllm(answer, CARD)[0].versions == ((0, "step-3"),)
    answer["choices"][0]["weight_versions"] = dicts(("a", 0, 2), ("b", 2, 3))
    assert decode_vllm(answer, CARD)[0].versions == ((0, "a"), (6, "b"))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (3, "an array"), ([3], r"\[0\]: an object"), ([{}], "start and end"), (dicts(("a", 1, 3)), "do not follow"),
        (dicts(("a", 0, 2), ("b", 1, 3)), r"\[1\]: tokens \[1, 3\) do not follow"),
        (dicts(("a", 0, 1), ("b", 2, 3)), "do not follow"), (dicts(("a", 0, 2), ("b", 2, 1)), "do not follow"),
        (dicts(("a", 0, 2)), "of 2 tokens where there are 3"), (dicts(("a", 0, 4)), "of 4 tokens where there are 3"),
        (dicts((None, 0, 3)), "version"), (dicts(("", 0, 3)), "version"), (dicts(("x" * 256, 0, 3)), "version"),
        (dicts(("\ud800", 0, 3)), "UTF-8"), (dicts((True, 0, 3)), "version"), (dicts((2**70, 0, 3)), "version"),
        (dicts(("a", "0", 3)), "start"), (dicts(("a", 0, -3)), "end"),
    ],
)  # fmt: skip
def test_malformed_spans(value: Any, why: str) -> None:
    with pytest.raises(InvalidInput, match=why) as caught:
        decode_routes(sglang(bare(WIDE), weight_versions=value), CARD)
    assert caught.value.field.startswith("meta_info.weight_versions")


@pytest.mark.parametrize("value", [[], {}, True, "", 1.5])
def test_a_malformed_version(value: Any) -> None:
    with pytest.raises(InvalidInput, match=r"meta_info\.weight_version"):
        decode_routes(sglang(bare(WIDE), weight_version=value), CARD)


def test_empty_spans_are_left_out() -> None:
    assert read_spans(dicts(("a", 0, 0), ("b", 0, 2), ("c", 2, 2)), "x") == [Span("b", 0, 2)]
