"""The life of a request id from the records of every topic."""

from __future__ import annotations

from moebus.broker.ports import LogRecord
from moebus.producers.control.trace import TraceBuilder
from moebus.schemas.control import make_request
from moebus.schemas.members import DoneOperation, MemberOps, MemberState, Operation, encode_member, encode_ops, ops_key
from moebus.schemas.responses import Code, Phase, expected_response
from tests.unit.control_client.make import REQUEST, TOPICS, request_record, response, response_record


def member_records(request_id: str) -> list[LogRecord]:
    operation = Operation(offset=10, method="pause", request_id=request_id, step="drain", started_ms=1)
    value, headers = encode_member(MemberState(kind="worker", member_id="a", boot_id="b", operation=operation))
    busy = LogRecord(TOPICS.members, 0, 4, 1_150, b"a", value, tuple(headers))
    op = DoneOperation(offset=10, method="pause", request_id=request_id, code=Code.OK, finished_ms=1)
    value, headers = encode_ops(MemberOps(member_id="a", ops=[op]))
    return [busy, LogRecord(TOPICS.members, 0, 5, 1_500, ops_key("a"), value, tuple(headers))]


def test_events_in_order_of_append_time() -> None:
    issued = make_request("r1", "pause", {"mode": "abort"}, target="role=rollout", issuer="me", deadline_s=30.0)
    dead = LogRecord(TOPICS.dlt, 0, 0, 1_600, b"t.control.requests.v1/0/12", b"x", (("reason", b"not_json"),))
    records = [
        response_record(expected_response("r1", REQUEST.digest, 10, ("a", "b")), 1, 1_050),
        response_record(response("a", phase=Phase.ACCEPTED), 2, 1_100),
        response_record(response("a"), 3, 1_300),
        request_record(issued, 10, 1_000),
        request_record(make_request("c", "decide", {"request_id": "r1", "decision": "void"}, issuer="me"), 11, 1_400),
        request_record(issued, 12, 1_550),
        *member_records("r1"),
        *member_records("r1"),  # heartbeats repeat it
        dead,
    ]
    builder = TraceBuilder("r1", TOPICS)
    for record in records:
        builder.take(record)
    events = builder.events()
    assert [(event.what, event.actor) for event in events] == [
        ("published", "me"),
        ("expected", "issuer"),
        ("accepted", "a"),
        ("member", "a"),
        ("done", "a"),
        ("void", "me"),
        ("member", "a"),
        ("duplicate", "me"),
        ("dead_letter", "unknown"),
    ]
    assert events[0].detail == "pause target=role=rollout mode=abort deadline=30s"
    assert events[0].where == "t.control.requests.v1/0/10"
    assert events[1].detail == "a, b"
    assert events[3].detail == "in progress: pause drain"
    assert events[4].code == "ok"
    assert events[8].detail == "t.control.requests.v1/0/12: not_json"


def test_in_one_millisecond_causes_come_first_and_a_partition_keeps_its_order() -> None:
    records = [
        response_record(expected_response("r1", REQUEST.digest, 10, ("a", "b")), 1, 1_000),
        response_record(response("a", phase=Phase.STAGED), 2, 1_000),
        request_record(REQUEST, 10, 1_000),
        request_record(make_request("c", "decide", {"request_id": "r1", "decision": "commit"}), 11, 1_000),
        response_record(response("b", phase=Phase.ACCEPTED), 3, 1_000),
        response_record(response("a"), 4, 1_000),
    ]
    builder = TraceBuilder("r1", TOPICS)
    for record in records:
        builder.take(record)
    whats = [event.what for event in builder.events()]
    assert whats == ["published", "expected", "staged", "accepted", "commit", "done"]


def test_conflicting_and_invalid_records_are_told_apart() -> None:
    builder = TraceBuilder("r1", TOPICS)
    bare = b'{"request_id":"r1","method":"fly"}'
    builder.take(LogRecord(TOPICS.control_requests, 0, 1, 1, None, bare))
    builder.take(request_record(REQUEST, 2, 2))
    builder.take(request_record(make_request("r1", "resume"), 3, 3))
    builder.take(response_record(response("a", Code.CONFLICT, request_digest="f" * 64), 4, 4))
    events = builder.events()
    assert [event.what for event in events] == ["invalid", "published", "conflicting", "done"]
    assert "unknown method" in events[0].detail
    assert "another command" in events[3].detail


def test_records_of_others_and_rubbish_say_nothing() -> None:
    builder = TraceBuilder("r1", TOPICS)
    builder.take(request_record(make_request("other", "pause"), 1, 1))
    builder.take(LogRecord(TOPICS.control_requests, 0, 2, 2, None, b"rubbish"))
    builder.take(LogRecord(TOPICS.control_responses, 0, 2, 2, b"r1", b'{"request_id":"r1","status":200}'))
    builder.take(LogRecord(TOPICS.members, 0, 3, 3, b"a", b"[]"))
    builder.take(LogRecord(TOPICS.dlt, 0, 4, 4, b"t.control.requests.v1/0/2", b"x"))
    builder.take(LogRecord(TOPICS.control_requests, 0, 5, 5, None, None))
    for record in member_records("other"):
        builder.take(record)
    assert builder.events() == ()
