"""Targets, headers, answers, members, and the JSON Schemas that are checked in."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moebus.schemas.control import make_request
from moebus.schemas.control_args import ARGS, Method
from moebus.schemas.errors import BadRecord, InvalidInput
from moebus.schemas.export import control_schemas, main
from moebus.schemas.headers import build_headers, is_traceparent, read_headers
from moebus.schemas.members import (
    DoneOperation,
    MemberOps,
    MemberState,
    decode_member,
    decode_ops,
    encode_member,
    encode_ops,
    ops_key,
    split_key,
)
from moebus.schemas.responses import (
    HTTP_CODES,
    Code,
    ControlResponse,
    Lifecycle,
    Phase,
    Residency,
    Weights,
    WorkerState,
    decode_response,
    encode_response,
    expected_response,
)
from moebus.schemas.tags import Tag
from moebus.schemas.target import check_labels, parse_target

DOCS = Path(__file__).parents[3] / "docs" / "schemas"
STATE = WorkerState(
    lifecycle=Lifecycle.PAUSED,
    tags={Tag.WEIGHT: Residency.RESIDENT, Tag.KV_CACHE: Residency.ASLEEP},
    weights=Weights.VALID,
    version="v1",
)


def response(**fields: Any) -> ControlResponse:
    base: dict[str, Any] = {
        "request_id": "r",
        "request_digest": "d",
        "request_offset": 3,
        "worker_id": "w1",
        "boot_id": "b",
        "phase": Phase.DONE,
        "code": Code.OK,
        "error_code": 200,
    }
    return ControlResponse(**{**base, **fields})


@pytest.mark.parametrize(
    ("target", "worker", "labels", "expected"),
    [
        (None, "w", {}, True),
        ("all", "w", {}, True),
        (" all ", "w", {}, True),
        ("w", "w", {}, True),
        ("w", "v", {}, False),
        (["a", "w"], "w", {}, True),
        (["all"], "w", {}, False),
        ("role=rollout", "w", {"role": "rollout"}, True),
        ("role=rollout", "w", {"role": "eval"}, False),
        ("role=rollout", "w", {}, False),
        ("role = rollout , zone in ( a , b )", "w", {"role": "rollout", "zone": "b"}, True),
        ("role=rollout,zone in (a,b)", "w", {"role": "rollout", "zone": "c"}, False),
        ("role=", "w", {"role": ""}, True),
        ("k8s.io/pool in (x)", "w", {"k8s.io/pool": "x"}, True),
    ],
)
def test_targets(target: object, worker: str, labels: dict[str, str], expected: bool) -> None:
    assert parse_target(target).matches(worker, labels) is expected


@pytest.mark.parametrize(
    "target",
    ["", " ", "a b", "a=b,", ",a=b", "in a", "zone in ()", "zone in (a,)", "a=b c=d", "a=b;c", [], [1], ["a b"], 3, {}],
)
def test_bad_targets(target: object) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_target(target)
    assert caught.value.field == "target"


@given(st.text(max_size=60))
def test_any_target(text: str) -> None:
    with suppress(InvalidInput):
        parse_target(text).matches("w", {"a": "b"})


def test_labels() -> None:
    assert check_labels({"role": "rollout"}) == {"role": "rollout"}
    with pytest.raises(InvalidInput, match="labels: 'a b'='c'"):
        check_labels({"a b": "c"})
    with pytest.raises(InvalidInput, match="more than 384 bytes"):
        check_labels({f"label{n}": "x" * 60 for n in range(10)})


def test_headers() -> None:
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    kept = read_headers(build_headers(correlation_id="r", producer_id="p", traceparent=parent, content_encoding="zstd"))
    assert (kept.traceparent, kept.correlation_id, kept.producer_id) == (parent, "r", "p")
    assert (kept.schema_version, kept.content_type, kept.content_encoding) == (1, "application/json", "zstd")
    one = read_headers(build_headers(correlation_id="r", producer_id="p", traceparent="nonsense"))
    other = read_headers(build_headers(correlation_id="r", producer_id="q"))
    assert one.traceparent is not None
    assert other.traceparent is not None
    assert is_traceparent(one.traceparent)
    assert one.traceparent[:35] == other.traceparent[:35], "one request, one trace"
    assert one.traceparent != other.traceparent


@given(st.lists(st.tuples(st.text(max_size=20), st.none() | st.binary(max_size=20))))
def test_any_headers(headers: list[tuple[str, bytes | None]]) -> None:
    assert read_headers(headers).traceparent is None


def test_repeated_headers_count_last() -> None:
    values: list[tuple[str, bytes | None]] = [("correlation-id", b"a"), ("correlation-id", None)]
    view = read_headers([*values, ("Correlation-ID", b"b"), ("correlation-id", b"\xff")])
    assert view.correlation_id == "b"


def test_codes() -> None:
    assert set(HTTP_CODES) == set(Code)
    assert {code for code in Code if code.good} == {Code.OK, Code.ALREADY}
    assert response(code=Code.UNAUTHORIZED, error_code=401).error_code == 401
    with pytest.raises(ValueError, match="500 is not the number of ok"):
        response(error_code=500)


def test_responses_round_trip() -> None:
    answer = response(state=STATE, result={"tags": {"weight": {"outcome": "done", "freed_bytes": 3}}}, started_at=1.5)
    value, headers = encode_response(answer, traceparent=None)
    assert decode_response(value, headers) == answer
    listed = expected_response("r", "d", 3, ["w1", "w2"])
    assert decode_response(*encode_response(listed)).expected_workers == ("w1", "w2")


@pytest.mark.parametrize("left_out", ["code", "error_code", "phase", "request_digest", "worker_id", "boot_id"])
def test_a_response_without_a_code_is_an_error(left_out: str) -> None:
    body = json.loads(encode_response(response())[0])
    del body[left_out]
    with pytest.raises(BadRecord) as caught:
        decode_response(json.dumps(body).encode())
    assert caught.value.reason == "bad_response"


@pytest.mark.parametrize(
    "value",
    [
        None,
        b"",
        b"{",
        b"[]",
        b'{"request_id": "r", "status": 200, "msg": "ok"}',
        encode_response(response())[0][:-1] + b',"seq":0}',
    ],
)
def test_foreign_responses(value: bytes | None) -> None:
    with pytest.raises(BadRecord):
        decode_response(value)


def member(**fields: Any) -> MemberState:
    return MemberState(kind="worker", member_id="w1", boot_id="b", state=STATE, **fields)


def test_members_round_trip_within_two_kilobytes() -> None:
    labels = {f"l{n}": "x" * 40 for n in range(8)}
    state = member(labels=labels, bytes={Tag.WEIGHT: 1 << 40}, reason="r" * 200, applied=3)
    value, headers = encode_member(state)
    assert decode_member(value, headers) == state
    assert len(value) <= 2048
    long = member(labels={"l": "x" * 350}, reason="r" * 200, desired={"phase": "y" * 1300, "reason": "x" * 120})
    assert decode_member(*encode_member(long)).reason is None
    with pytest.raises(InvalidInput, match=r"member: .* at most 2048"):
        encode_member(member(desired={"x": "y" * 2048}))


def test_ops_drop_the_oldest() -> None:
    ops = [DoneOperation(offset=n, method="pause", request_id="ä" * 64, code=Code.OK, finished_ms=1) for n in range(20)]
    value, headers = encode_ops(MemberOps(member_id="w1", ops=ops))
    assert len(value) <= 2048
    assert decode_ops(value, headers).ops[-1].offset == 19


def test_keys() -> None:
    assert split_key(ops_key("w1")) == ("w1", True)
    assert split_key(b"w1") == ("w1", False)
    assert split_key(None) is None
    assert split_key(b"\xff") is None


def test_liveness() -> None:
    assert member().live(0, 9_999)
    assert not member().live(0, 10_000)
    assert member(busy_until=20_001).live(0, 20_000)


@pytest.mark.parametrize("name", control_schemas())
def test_the_schemas_in_docs_are_current(name: str) -> None:
    assert (DOCS / name).read_text() == control_schemas()[name], "run python -m moebus.schemas.export docs/schemas"


def test_export_writes_them(tmp_path: Path) -> None:
    assert main([str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == set(control_schemas())
    assert main([]) == 2


def test_the_request_schema_accepts_and_refuses_as_the_model() -> None:
    schema = json.loads(control_schemas()["control-request.v1.json"])
    validator = jsonschema.Draft202012Validator(schema)
    good = make_request("r", "sleep", {"tags": "weight", "level": "discard"}, target="a=b", deadline_s=3).wire()
    assert validator.is_valid(good)
    assert validator.is_valid({"request_id": "r", "method": "resume"})
    assert not validator.is_valid({"request_id": "r", "method": "update_weights"})
    assert not validator.is_valid({"request_id": "r", "method": "sleep", "args": {"zap": 1}})
    assert not validator.is_valid({"request_id": "r", "method": "zap"})
    assert set(ARGS) == set(Method)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("control-response.v1.json", encode_response(response(state=STATE))[0]),
        ("member-state.v1.json", encode_member(member())[0]),
    ],
)
def test_the_other_schemas(name: str, value: bytes) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(control_schemas()[name]))
    body = json.loads(value)
    validator.validate(body)
    assert not validator.is_valid({**body, "zap": 1})
