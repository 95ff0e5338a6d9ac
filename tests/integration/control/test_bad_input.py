"""Whatever lies in the command log: it is answered `invalid` or put aside, and the next record is served."""

from __future__ import annotations

import json

import pytest
import zstandard

from moebus.schemas.responses import Code
from tests.support.control_lab import Lab

UNREADABLE = {
    b"": "empty",
    b"{": "not_json",
    b"\xff\xfe": "not_json",
    b"[1, 2]": "not_object",
    b'"pause"': "not_object",
    b"{}": "no_request_id",
    b'{"request_id": 7, "method": "pause"}': "no_request_id",
    b'{"request_id": "", "method": "pause"}': "no_request_id",
    json.dumps({"request_id": "x" * 256, "method": "pause"}).encode(): "no_request_id",
    b'{"request_id": "a\\n", "method": "pause"}': "no_request_id",
    b'{"request_id": "a", "request_id": "b", "method": "pause"}': "no_request_id",
    b"[" * 100_000: "too_deep",
}
INVALID = {
    '{"request_id": "bad"}': "method: missing",
    '{"request_id": "bad", "method": "explode"}': "method: unknown method 'explode'",
    '{"request_id": "bad", "method": "pause", "force": true}': "force: unknown field",
    '{"request_id": "bad", "method": "pause", "args": {"now": 1}}': "args.now: unknown field",
    '{"request_id": "bad", "method": "sleep", "args": {"tags": "all"}}': "args.tags: unknown tag 'all'",
    '{"request_id": "bad", "method": "sleep", "args": {"tags": ""}}': "args.tags: unknown tag ''",
    '{"request_id": "bad", "method": "abort_requests", "args": {"ids": []}}': "args.ids: empty",
    '{"request_id": "bad", "method": "pause", "target": {}}': "target: a string or a list",
    '{"request_id": "bad", "method": "pause", "target": "zone in ("}': "target: neither an id",
    '{"request_id": "bad", "method": "pause", "deadline_s": 0}': "deadline_s: input should be greater than 0",
    '{"request_id": "bad", "method": "pause", "deadline_s": NaN}': "value: NaN is not JSON",
    '{"request_id": "bad", "method": "pause", "method": "resume"}': "method: the key appears twice",
    '{"request_id": "bad", "method": "pause", "expect": {"after": "x"}}': "expect.after: input should be a valid",
    '{"request_id": "bad", "method": "decide", "args": {"request_id": "x", "decision": "void"}}': "args.request_id: no",
    '{"request_id": "bad", "method": "pause", "args": ' + "[" * 100 + "]" * 100 + "}": "value: nested deeper than 64",
}


@pytest.mark.parametrize("value", UNREADABLE)
def test_a_record_without_a_readable_id_is_put_aside(lab: Lab, value: bytes) -> None:
    lab.host(lab.engine())
    offset = lab.send_raw(value, [("odd", None), ("odd", b"\xff")], key=b"k")
    assert lab.ask("pause").code is Code.OK
    (letter,) = lab.records(lab.topics.dlt)
    assert letter.key == f"t.control.requests.v1/0/{offset}".encode()
    assert letter.value == value
    assert letter.header("reason") == UNREADABLE[value].encode()
    assert letter.header("original-key") == b"k"
    assert lab.metrics.value("moebus_dead_letters_total", reason=UNREADABLE[value]) == 1


@pytest.mark.parametrize("text", INVALID)
def test_an_invalid_command_is_answered_and_binds_no_id(lab: Lab, text: str) -> None:
    engine = lab.engine()
    lab.host(engine)
    lab.send_raw(text.encode())
    lab.turn()
    answer = lab.answer("bad")
    assert (answer.code, answer.error_code) == (Code.INVALID, 400)
    assert answer.message.startswith(INVALID[text])
    assert not engine.inspect().paused
    assert lab.ask("pause", id="bad").code is Code.OK
    assert lab.records(lab.topics.dlt) == []


def test_null_values_are_only_counted(lab: Lab) -> None:
    lab.host(lab.engine())
    lab.send_raw(None, key=None)
    assert lab.ask("pause").code is Code.OK
    assert lab.records(lab.topics.dlt) == []


def test_a_bare_fastdeploy_command_is_one(lab: Lab) -> None:
    lab.host(lab.engine())
    lab.send_raw(b'{"request_id": "control-1", "method": "pause", "args": {}}')
    lab.turn()
    assert lab.answer("control-1").code is Code.OK


@pytest.mark.parametrize(
    ("value", "encoding", "reason"),
    [
        (b"not zstd", b"zstd", b"bad_encoding"),
        (zstandard.compress(b" " * (17 << 20)), b"zstd", b"too_large"),
        (b"{}", b"gzip", b"bad_encoding"),
    ],
)
def test_bad_encodings_are_put_aside(lab: Lab, value: bytes, encoding: bytes, reason: bytes) -> None:
    lab.host(lab.engine())
    lab.send_raw(value, [("content-encoding", encoding)])
    assert lab.ask("pause").code is Code.OK
    assert [letter.header("reason") for letter in lab.records(lab.topics.dlt)] == [reason]


def test_a_compressed_command_of_36000_names_passes(lab: Lab) -> None:
    lab.host(lab.engine())
    lab.ask("pause")
    names = [f"model.layers.{n}.mlp.experts.{n % 256}.down_proj.weight" for n in range(36_000)]
    info = {"names": names, "shapes": [[n, 7168] for n in range(36_000)]}
    assert lab.ask("transfer_weights", {"step": "init", "info": info}).code is Code.OK


def test_a_large_dead_letter_is_cut(lab: Lab) -> None:
    lab.host(lab.engine())
    value = b"x" * 899_000
    lab.send_raw(value)
    assert lab.ask("pause").code is Code.OK
    (letter,) = lab.records(lab.topics.dlt)
    assert letter.value == value[:880_000]
    assert letter.header("truncated") == b"899000"


def test_what_was_put_aside_before_is_not_put_aside_again(lab: Lab) -> None:
    engine = lab.engine()
    first = lab.host(engine)
    lab.send_raw(b"{")
    lab.ask("pause")
    lab.crash(first)
    lab.send_raw(b"[")
    lab.silence()
    lab.host(engine)
    lab.host(lab.engine(), ids=("w2",))
    assert [letter.value for letter in lab.records(lab.topics.dlt)] == [b"{", b"["]
