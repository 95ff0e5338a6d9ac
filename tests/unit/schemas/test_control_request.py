"""Parsing of what anybody may have written into the command log."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from moebus.broker.ports import MAX_RECORD_BYTES
from moebus.schemas.control import (
    ControlRequest,
    InvalidRequest,
    encode_request,
    make_request,
    parse_request,
    request_digest,
)
from moebus.schemas.control_args import ARGS, Method, SleepArgs, WakeupArgs, parse_args
from moebus.schemas.errors import BadRecord, InvalidInput
from moebus.schemas.jsonwire import MAX_DECODED_BYTES, RECORD_LIMIT_BYTES
from moebus.schemas.tags import parse_tags
from moebus.schemas.target import EVERYONE

TAG_CASES = json.loads((Path(__file__).parents[2] / "cases" / "tags.json").read_text())["cases"]


def wire(**fields: Any) -> bytes:
    return json.dumps({"request_id": "r", "method": "pause", **fields}).encode()


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_fastdeploys_bare_form() -> None:
    request = parse_request(b'{"request_id": "control-1", "method": "sleep", "args": {"tags": "weight,kv_cache"}}')
    assert (request.request_id, request.method, request.where) == ("control-1", Method.SLEEP, EVERYONE)
    assert isinstance(request.command, SleepArgs)
    assert [str(tag) for tag in request.command.tags] == ["weight", "kv_cache"]


def test_null_args_are_no_args() -> None:
    assert parse_request(wire(args=None)).command == parse_request(wire()).command


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"method": "pause"}, '["pause"]'),
        ({"method": "pause", "args": {}}, '["pause",{}]'),
        ({"method": "pause", "args": None}, '["pause",null]'),
        ({"target": ["b", "a"], "method": "pause"}, '["pause",["b","a"]]'),
        ({"args": {"b": 1.5, "a": "ä"}, "method": "x", "target": "all"}, '["x",{"a":"ä","b":1.5},"all"]'),
        ({"method": "pause", "deadline_s": 3, "run": "r", "issuer": "me"}, '["pause"]'),
    ],
)
def test_digest(record: dict[str, Any], text: str) -> None:
    assert request_digest(record) == sha(text)


def test_the_digest_of_a_parsed_request_is_of_what_was_written() -> None:
    value = b'{"request_id":"r","args":{"tags":["kv_cache"," weights "]},"method":"sleep"}'
    assert parse_request(value).digest == sha('["sleep",{"tags":["kv_cache"," weights "]}]')
    assert make_request("r", "pause").digest == sha('["pause"]')
    assert make_request("r", "pause", {}).digest == sha('["pause",{}]')


@pytest.mark.parametrize("case", TAG_CASES, ids=lambda case: repr(case["tags"]))
@pytest.mark.parametrize("method", ["sleep", "wakeup"])
def test_tags(case: dict[str, Any], method: str) -> None:
    value = json.dumps({"request_id": "r", "method": method, "args": {"tags": case["tags"]}}).encode()
    if "error" in case:
        with pytest.raises(InvalidRequest) as caught:
            parse_request(value)
        assert caught.value.field == "args.tags"
        return
    args = parse_request(value).command
    assert isinstance(args, (SleepArgs, WakeupArgs))
    assert [str(tag) for tag in args.tags] == case["result"]


@pytest.mark.parametrize("case", [c for c in TAG_CASES if "fastdeploy_http" in c], ids=lambda c: repr(c["tags"]))
def test_tags_of_fastdeploys_paths(case: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="unknown tag"):
        parse_tags(case["tags"], aliases=False)


def test_unreadable_and_invalid_are_told_apart() -> None:
    with pytest.raises(BadRecord) as bad:
        parse_request(b"{")
    assert bad.value.reason == "not_json"
    with pytest.raises(InvalidRequest) as caught:
        parse_request(b'{"request_id": "r", "method": "zap", "target": "w1"}')
    error = caught.value
    assert (error.request_id, error.field, error.method) == ("r", "method", "zap")
    assert error.digest == sha('["zap","w1"]')
    assert error.target is not None
    assert error.target.matches("w1", {})
    assert not error.target.matches("w2", {})


def test_an_unreadable_target_means_everybody_answers() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_request(wire(target=3))
    assert caught.value.target is None
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.request_id, copy.field, copy.digest) == ("r", "target", caught.value.digest)


@pytest.mark.parametrize(
    "value", [None, b"", b"null", b"3", b'"x"', b"[]", b"{}", b"\x00", b'{"request_id":', b"[" * 99_999]
)
def test_no_id_no_answer(value: bytes | None) -> None:
    with pytest.raises(BadRecord):
        parse_request(value)


@settings(deadline=None)
@given(st.binary(max_size=200), st.sampled_from([None, b"zstd", b"\xff", b"gzip", b"identity"]))
def test_any_bytes(value: bytes, encoding: bytes | None) -> None:
    with suppress(BadRecord, InvalidRequest):
        parse_request(value, [("content-encoding", encoding), ("content-encoding", encoding)])


FIELDS = ["method", "args", "target", "deadline_s", "issuer", "run", "expect", "schema_version", "x"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.sampled_from(list(Method)) | st.none())
def test_any_fields(fields: dict[str, Any], method: Method | None) -> None:
    record = {**fields, "request_id": "r", **({"method": str(method)} if method is not None else {})}
    found: ControlRequest | InvalidRequest
    try:
        found = parse_request(json.dumps(record).encode())
    except InvalidRequest as error:
        found = error
    assert found.request_id == "r"
    assert found.digest == request_digest(json.loads(json.dumps(record)))


@pytest.mark.parametrize("method", Method)
def test_every_method_names_its_unknown_arguments(method: Method) -> None:
    assert method in ARGS
    with pytest.raises(InvalidInput, match=r"args\.[a-z_]+: (unknown field|missing)"):
        parse_args(method, {"zzz": 1})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"request_id": "x" * 256}, "request_id: 1 to 255"),
        ({"request_id": "\u200b"}, "request_id: 1 to 255"),
        ({"deadline_s": True}, "deadline_s:"),
        ({"deadline_s": "3"}, "deadline_s: input should be a valid number"),
        ({"deadline_s": 1e9}, "deadline_s: input should be less than"),
        ({"schema_version": 2}, "schema_version: input should be 1"),
        ({"expect": {"before": 1}}, "expect.before: unknown field"),
        ({"run": "a b"}, "run: "),
        ({"args": []}, "args: "),
    ],
)
def test_fields(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        ControlRequest.parse({"request_id": "r", "method": "pause", **fields})
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("method", "args", "seconds"),
    [
        ("pause", None, 60.0),
        ("update_weights", {"version": "v"}, 600.0),
        ("begin_run", {"run": "r"}, math.inf),
        ("decide", {"request_id": "u", "decision": "void"}, math.inf),
    ],
)
def test_default_deadlines(method: str, args: dict[str, Any] | None, seconds: float) -> None:
    assert make_request("r", method, args).seconds == seconds


def test_round_trip_and_headers() -> None:
    fields: dict[str, Any] = {"target": ["w1"], "deadline_s": 3.5, "issuer": "me", "expect": {"after": 3}}
    request = make_request("r-ä", "pause", {"mode": "keep"}, **fields)
    value, headers = encode_request(request)
    assert parse_request(value, headers) == request
    assert parse_request(value, headers).digest == request.digest
    assert dict(headers)["correlation-id"] == "r-ä".encode()
    assert "content-encoding" not in dict(headers)


def test_large_commands_are_compressed_and_bounded() -> None:
    info = {"names": [f"model.layers.{n}.mlp.experts.{n}.weight" for n in range(36_000)]}
    request = make_request("r", "transfer_weights", {"step": "update", "info": info})
    value, headers = encode_request(request)
    assert dict(headers)["content-encoding"] == b"zstd"
    assert len(value) < RECORD_LIMIT_BYTES == MAX_RECORD_BYTES
    assert parse_request(value, headers) == request
    noise = [hashlib.sha256(str(n).encode()).hexdigest() for n in range(40_000)]
    with pytest.raises(InvalidInput, match=r"args: \d+ bytes compressed, a record takes 900000"):
        encode_request(make_request("r", "transfer_weights", {"step": "update", "info": {"x": noise}}))
    with pytest.raises(InvalidInput, match="at most 16777216 are allowed"):
        encode_request(make_request("r", "transfer_weights", {"step": "update", "info": {"x": " " * (17 << 20)}}))


def test_a_decoded_size_above_the_limit_is_refused_before_it_is_allocated() -> None:
    bomb = zstandard.compress(b" " * (MAX_DECODED_BYTES + 1))
    with pytest.raises(BadRecord, match="too_large: 16777217 bytes decoded"):
        parse_request(bomb, [("content-encoding", b"zstd")])
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(b" " * (MAX_DECODED_BYTES + 1))
    with pytest.raises(BadRecord, match="bad_encoding"):
        parse_request(unsized, [("content-encoding", b"zstd")])
    small = zstandard.ZstdCompressor(write_content_size=False).compress(wire())
    assert parse_request(small, [("Content-Encoding", b" ZSTD ")]).method is Method.PAUSE


@pytest.mark.parametrize(
    ("info", "accepted"),
    [("[" * 60 + "]" * 60, True), ("[" * 63 + "]" * 63, False), ("[" + ",".join(["[]"] * 500) + "]", True)],
    ids=["deep enough", "too deep", "wide"],
)
def test_depth(info: str, accepted: bool) -> None:
    """64 levels in all, counted from the record; many brackets beside each other are no depth."""
    value = f'{{"request_id":"r","method":"transfer_weights","args":{{"step":"init","info":{{"x":{info}}}}}}}'.encode()
    if accepted:
        assert parse_request(value).method is Method.TRANSFER_WEIGHTS
    else:
        with pytest.raises(InvalidRequest, match="nested deeper than 64 levels"):
            parse_request(value)
