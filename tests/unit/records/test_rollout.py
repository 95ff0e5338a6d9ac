from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebus.schemas.attempt import attempt_text, new_attempt, parse_attempt
from moebus.schemas.dtypes import fastdeploy_dtype, fill_value, wire_dtype
from moebus.schemas.errors import InvalidInput
from moebus.schemas.fastdeploy_ids import parse_request_id
from moebus.schemas.rollout import (
    RolloutId,
    RolloutKey,
    ancestors,
    check_prefix,
    check_run,
    covers,
    default_group,
    partition_key,
    rollout_key,
    structured,
)

CASES = Path(__file__).parents[2] / "cases"


def load(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((CASES / name).read_text())
    return data


@pytest.mark.parametrize("row", load("rollout_ids.json")["structured"], ids=lambda row: row["id"])
def test_structured_ids(row: dict[str, Any]) -> None:
    if row["verdict"] == "refused":
        with pytest.raises(InvalidInput, match="rollout_id"):
            RolloutId.parse(row["id"])
        assert structured(row["id"]) is None
        assert rollout_key("run", row["id"]).rollout_id == row["id"]  # still a valid opaque id
        assert default_group(row["id"]) == row["id"]
    else:
        parts = RolloutId.parse(row["id"])
        assert (parts.data, parts.gen, parts.turn, parts.segment) == (
            row["data"], row["gen"], row["turn"], row["segment"],
        )  # fmt: skip
        assert str(parts) == row["id"]
        assert default_group(row["id"]) == row["data"]


@pytest.mark.parametrize("row", load("rollout_ids.json")["fastdeploy_request_ids"], ids=lambda row: row["request_id"])
def test_fastdeploy_request_ids(row: dict[str, Any]) -> None:
    if row["verdict"] == "refused":
        with pytest.raises(InvalidInput, match="request_id"):
            parse_request_id(row["request_id"])
        return
    parsed = parse_request_id(row["request_id"])
    assert (parsed.rollout_id, parsed.choice) == (row["rollout_id"], row["choice"])
    parts = structured(parsed.rollout_id)
    if row["verdict"] == "opaque":
        assert parts is None
    elif "data" in row:
        assert parts == RolloutId(row["data"], row["gen"], row["turn"], row["segment"])


def test_fastdeploy_user_must_be_parted_from_the_uuid() -> None:
    with pytest.raises(InvalidInput, match="request_id"):
        parse_request_id("chatcmpl-userd9f16c5c-65f6-4815-b44d-14e2c581907c_0")
    with pytest.raises(InvalidInput, match="above 65535"):
        parse_request_id("chatcmpl-u-d9f16c5c-65f6-4815-b44d-14e2c581907c_65536")


@pytest.mark.parametrize("row", load("prefixes.json")["cases"], ids=lambda row: row["prefix"] or "empty")
def test_prefixes(row: dict[str, Any]) -> None:
    if "error" in row:
        with pytest.raises(InvalidInput, match="prefix"):
            check_prefix(row["prefix"])
        return
    ids = load("prefixes.json")["ids"]
    assert check_prefix(row["prefix"]) == row["prefix"]
    assert {rollout_id for rollout_id in ids if covers(row["prefix"], rollout_id)} == set(row["removed"])


@given(st.text(st.sampled_from(":ab1"), min_size=1, max_size=12), st.text(st.sampled_from(":ab1"), max_size=12))
def test_ancestors_are_exactly_the_valid_prefixes_that_cover(rollout_id: str, prefix: str) -> None:
    valid = prefix != "" and not prefix.endswith(":")
    assert (prefix in ancestors(rollout_id)) == (valid and covers(prefix, rollout_id))


@pytest.mark.parametrize("run", ["", "a" * 65, "a/b", "a b", "é", "a\n"])
def test_bad_runs(run: str) -> None:
    with pytest.raises(InvalidInput, match="run"):
        check_run(run)


def test_sizes_are_bytes_of_utf8() -> None:
    assert rollout_key("r", "é" * 127 + "x").rollout_id.endswith("x")
    for bad in ("", "é" * 128, "\ud800"):
        with pytest.raises(InvalidInput, match="rollout_id"):
            rollout_key("r", bad)
    for choice in (-1, 65_536, True):
        with pytest.raises(InvalidInput, match="choice"):
            rollout_key("r", "a", choice)


def test_key_and_group() -> None:
    assert partition_key("run", default_group("a:b:0:1:0")) == b"run/a:b"
    assert str(RolloutKey("run", "a", 3)) == "run/a#3"


def test_dtypes() -> None:
    cases = load("dtypes.json")
    for experts, name in cases["wire"]:
        assert wire_dtype(experts) == name
    for experts, name, fill in cases["fastdeploy_export"]:
        assert (fastdeploy_dtype(experts), fill_value(name)) == (name, fill)
    for experts in [*cases["invalid_expert_counts"], 2**32 + 1, True]:
        with pytest.raises(InvalidInput, match="num_experts"):
            wire_dtype(experts)


@given(st.binary(min_size=16, max_size=16))
def test_attempt_text_round_trip(attempt: bytes) -> None:
    text = attempt_text(attempt)
    assert len(text) == 26
    assert parse_attempt(text) == parse_attempt(text.lower()) == attempt


def test_attempts_sort_by_time_and_bad_ones_are_refused() -> None:
    earlier, later = new_attempt(1_000, b"\xff" * 10), new_attempt(1_001, b"\0" * 10)
    assert attempt_text(earlier) < attempt_text(later)
    assert earlier < later
    for bad in ("", "8" + "0" * 25, "U" * 26, "0" * 27):
        with pytest.raises(InvalidInput, match="attempt"):
            parse_attempt(bad)
    with pytest.raises(InvalidInput, match="randomness"):
        new_attempt(0, b"")
