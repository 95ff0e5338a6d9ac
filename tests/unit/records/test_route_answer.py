from __future__ import annotations

import pytest

from moebus.schemas.errors import InvalidInput
from moebus.schemas.route_answer import RouteAnswer
from moebus.schemas.route_ref import RouteRef

REF = RouteRef("run", "é:0:1:0", 1, "0" * 26, 12, "groß", "a" * 32)
ANSWER = RouteAnswer(
    REF, 2, 3, (1, 5), 4, 300, "partial", "stop: ü", 7, ((2, "v1"), (4, "vé")), "c" * 32, 3, 99, "ids", 77
)  # fmt: skip


def test_round_trip_in_ascii() -> None:
    headers = ANSWER.to_headers()
    assert all(value.isascii() for value in headers.values())
    assert RouteAnswer.from_headers(headers) == ANSWER
    assert (ANSWER.dtype.str, ANSWER.shape, ANSWER.nbytes) == ("<u2", (3, 2, 4), 48)


def test_no_rows_and_too_many_versions() -> None:
    empty = RouteAnswer(REF, 0, 0, (), 0, 0, "missing")
    assert RouteAnswer.from_headers(empty.to_headers()) == empty
    assert empty.nbytes == 0
    many = RouteAnswer(REF, 0, 1, (1,), 1, 2, "complete", versions=tuple((row, "v" * 200) for row in range(200)))
    assert RouteAnswer.from_headers(many.to_headers()).versions is None


def test_an_unknown_level_vouches_for_nothing() -> None:
    assert RouteAnswer.from_headers({**ANSWER.to_headers(), "moebus-checked": "twice"}).checked == "off"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moebus-ref", "x"), ("moebus-ref", "[]"), ("moebus-rows", "-1"), ("moebus-status", "done"),
        ("moebus-dtype", "<u4"),
        ("moebus-layers", "1,x"), ("moebus-versions", "[1]"), ("moebus-epoch", "9" * 30),
        ("moebus-checksum", "77"), ("moebus-checksum", "g" * 16),
    ],
)  # fmt: skip
def test_malformed_fields_are_named(name: str, value: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        RouteAnswer.from_headers({**ANSWER.to_headers(), name: value})
    without = {key: text for key, text in ANSWER.to_headers().items() if key != "moebus-top-k"}
    with pytest.raises(InvalidInput, match="moebus-top-k"):
        RouteAnswer.from_headers(without)
